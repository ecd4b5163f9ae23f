"""How a script ends, and what it says while its output has a reader and when that has gone."""

import gc
import io
import os
import pty
import signal
import subprocess
import sys

import pytest
from processes import ROOT, exit_code, fails, fork

import train
from plaingpt.core.checkpoint import find
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.formatting import printable


def test_each_mistake_is_one_line_before_exit_code_2(capsys):
    def main(_):
        raise UserError('one\ntwo')
    with pytest.raises(SystemExit, match='2'):
        run_script(main)
    assert capsys.readouterr().err == 'error: one\nerror: two\n'


class Stream(io.TextIOWrapper):
    """A stream on a code page that lacks most letters, of a terminal or of a file."""

    def __init__(self, is_terminal=False, content=''):
        super().__init__(io.BytesIO(content.encode()), 'ascii')
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(('is_terminal', 'text'), [
    (False, 'größer 中'.encode()), (True, b'gr??er ?')], ids=['utf-8', 'question marks'])
def test_every_letter_can_be_printed_on_every_code_page(is_terminal, text, monkeypatch):
    out, err = Stream(is_terminal), Stream(is_terminal)
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(sys, 'stderr', err)

    def main(_):
        print('größer 中')
        raise UserError('größer 中')
    with pytest.raises(SystemExit, match='2'):
        run_script(main)
    assert out.buffer.getvalue() == text + b'\n'
    assert err.buffer.getvalue() == b'error: ' + text + b'\n'


def test_input_from_a_file_is_utf8_on_every_code_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', Stream(content='größer 中\n'))
    run_script(lambda _: print(input()))
    assert capsys.readouterr().out == 'größer 中\n'


def test_an_error_of_the_system_names_the_file(tmp_path, capsys, monkeypatch):
    line = fails(capsys, monkeypatch, lambda _: tmp_path.read_text())
    assert str(tmp_path) in line


def test_a_bug_keeps_its_traceback():
    def main(_):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        run_script(main)


def test_imported_modules_are_exempt_from_garbage_collection():
    counts = []
    gc.unfreeze()
    run_script(lambda _: counts.append(gc.get_freeze_count()))
    gc.unfreeze()
    assert counts[0] > 100_000


def test_a_closed_pipe_prints_no_error():
    gone, broken = os.pipe()
    os.close(gone)
    done = subprocess.run([sys.executable, ROOT / 'prepare.py'], stdout=broken, text=True,
                          stderr=subprocess.PIPE)
    os.close(broken)
    assert (done.returncode, done.stderr) == (1, '')


def test_ctrl_c_during_setup_prints_no_traceback(tiny, tmp_path):
    def main(argv):
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(train, 'open_batches', lambda *_: os.kill(os.getpid(), signal.SIGINT))
        train.main(argv)

    assert exit_code(fork(main, *tiny, log=tmp_path / 'log')) == 130
    assert 'Traceback' not in (tmp_path / 'log').read_text()


def test_ctrl_c_that_c_code_turns_into_an_error_prints_no_traceback(tmp_path):
    def main(_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError('could not determine the shape') from None

    assert exit_code(fork(main, log=tmp_path / 'log')) == 130
    assert 'Traceback' not in (tmp_path / 'log').read_text()


def test_a_run_whose_terminal_is_closed_is_saved(tiny, tmp_path):
    terminal, end = pty.openpty()

    def main(argv):
        os.setsid()
        for fd in (0, 1, 2):
            os.dup2(os.open(os.ttyname(end), os.O_RDWR), fd)
        os.close(terminal)
        os.close(end)
        train.main(argv)

    pid = fork(main, *tiny, '--max_iters=100000', '--log_interval=1', '--lr_decay_iters=100000',
               '--check=False', log=os.devnull)
    os.close(end)
    seen = b''
    while b'iter      5' not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert exit_code(pid) == 0
    assert find(tmp_path / 'out').iter_num >= 5


def test_control_characters_are_escaped_for_a_terminal():
    assert printable('a\x1b]0;title\x07b\rc\x9b31md\t中\n') \
        == 'a\\x1b]0;title\\x07b\\rc\\x9b31md\t中\n'
