"""prepare.py killed while it works.

Run as a script: the process that those processes are copies of. It has imported prepare.py and done
nothing, so that a copy starts in a moment and waits for no thread that is not copied."""

import atexit
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import prepare
from plaingpt.data import encoding

ROOT = Path(prepare.__file__).parent


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def exit_code(*argv, calls=0):
    """Run prepare.py, which is killed in the place of the `calls`-th change of the disk, if not 0
    → its exit code."""
    request = [os.getcwd(), dict(os.environ), calls, *map(str, argv)]
    print(json.dumps(request), file=server().stdin, flush=True)
    return int(server().stdout.readline())


@cache
def server():
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'USE_TORCH': '0'}  # datasets loads torch else
    process = subprocess.Popen([sys.executable, __file__], text=True, env=env,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.communicate)  # closes its input, which ends it
    return process


def serve():
    for line in sys.stdin:
        cwd, env, calls, *argv = json.loads(line)
        if argv[0] == 'hf':
            import datasets  # noqa: F401  once, and not in each copy
        pid = os.fork()
        if pid == 0:
            os.chdir(cwd)
            os.environ.update(env)
            run(calls, argv)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(calls, argv):
    signal.alarm(100)  # no process outlives a test that fails
    left = [calls]
    for name in ('replace', 'fsync', 'truncate', 'unlink'):
        setattr(os, name, dying(getattr(os, name), left))
    sys.stdout = sys.stderr = open(os.devnull, 'w')
    encoding.BATCH_CHARS = 2**13  # so that few documents are many batches
    code = 1
    try:
        prepare.main(argv)
        code = 0
    finally:
        os._exit(code)


def dying(function, left):
    def call(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call


if __name__ == '__main__':
    serve()
