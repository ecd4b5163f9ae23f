"""A signal is obeyed also while a print waits for somebody to read it."""

import os
import select
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, wait_until

from plaingpt.training.checkpoint import newest_valid


@pytest.mark.skipif(sys.platform == 'win32', reason='pipes differ there')
def test_a_run_whose_output_nobody_reads_saves_when_it_is_told_to_stop(tiny, tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:  # fill the pipe, as a stopped `| less` does
            os.write(writer, b'.' * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    os.read(reader, 8192)  # room for the first lines
    run = subprocess.Popen([sys.executable, ROOT / 'train.py', *tiny, '--max_iters=100000',
                            '--lr_decay_iters=100000', '--check=False'], stdout=writer)
    metrics = tmp_path / 'out/metrics.jsonl'
    wait_until(lambda: metrics.exists() and not select.select([], [writer], [], 0)[1])
    run.send_signal(signal.SIGTERM)
    assert run.wait(100) == 0
    assert newest_valid(tmp_path / 'out')[0].iter_num > 0
    os.close(writer)
    os.close(reader)
