"""Windows and macOS: what Linux alone has is asked for where it is used, and is not needed."""

import os
import signal
import sys

from helpers import TINY, exit_code, fork

import prepare
import sample
import train


def take_away():
    """As on Windows: what os and signal lack there, and the modules that are not there."""
    for name in ('pread', 'pwrite', 'sched_getaffinity', 'getuid', 'geteuid', 'getloadavg'):
        delattr(os, name)
    for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGALRM', 'SIGKILL'):
        delattr(signal, name)
    import psutil  # noqa: F401  which is another one there
    for name in ('fcntl', 'resource', 'pwd', 'termios'):
        sys.modules[name] = None


def test_without_what_linux_alone_has_it_prepares_trains_resumes_and_samples(text_file, tmp_path):
    data, out = f'{tmp_path}/d', f'--out_dir={tmp_path}/out'
    run = [*TINY, f'--dataset={data}', out]
    for main, argv in (
            (prepare.main, ['text', text_file, '--tokenizer=char', f'--data_dir={data}']),
            (train.main, [*run, '--max_iters=3']),
            (train.main, [*run, '--init_from=resume']),
            (sample.main, [out, '--num_samples=1', '--max_new_tokens=5', '--device=cpu'])):
        code = exit_code(fork(main, *argv, log=tmp_path / 'log', before=take_away))
        assert code == 0, (tmp_path / 'log').read_text()
