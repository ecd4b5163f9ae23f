"""A process that has imported torch once and forks for each command that it is given: a script of
the project then starts in a tenth of the time. Run by `helpers.ForkServer`."""

import json
import os
import runpy
import sys
import traceback

import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.nn.parallel
import torch.utils.checkpoint  # noqa: F401
import tqdm  # noqa: F401


def run(script, argv, folder, log):
    """In the forked child: run a script as `python SCRIPT ARGV` does in `folder`, and exit."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.argv = [script, *argv]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 0
    try:
        runpy.run_path(script, run_name='__main__')
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
