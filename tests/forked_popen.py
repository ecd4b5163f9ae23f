"""subprocess.Popen for Python scripts of any copy of the project, as a fork of this process, which
has imported torch already: a script then starts in a tenth of the time."""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback

import torch._dynamo
import torch._inductor
import torch.distributed.fsdp  # noqa: F401

OURS = {'plaingpt', 'model', 'configurator', 'train', 'bench', 'prepare'}


class ForkedPopen(subprocess.Popen):
    def _execute_child(self, args, *rest):
        if args[0] != sys.executable:
            return super()._execute_child(args, *rest)
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for end in (p2cwrite, c2pread, errread):
                    if end != -1:
                        os.close(end)
                for fd, end in enumerate((p2cread, c2pwrite, errwrite)):
                    if end != -1:
                        os.dup2(end, fd)
                code = run_as_script(list(map(str, args[1:])))
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        for end, other in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if other != -1:  # a pipe, no file of the caller's
                os.close(end)
        self._child_created = True


def run_as_script(words):
    """In the forked child: do as `python WORDS`, with stdin, stdout and stderr of this process →
    the exit code"""
    sys.stdin, sys.stdout, sys.stderr = (
        open(fd, mode, closefd=False) for fd, mode in ((0, 'r'), (1, 'w'), (2, 'w')))
    for name in [name for name in sys.modules if name.split('.')[0] in OURS]:
        del sys.modules[name]
    importlib.invalidate_caches()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    code, sys.path[0] = 0, os.path.dirname(words[0])
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name='__main__')
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
