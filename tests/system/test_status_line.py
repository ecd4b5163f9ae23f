"""What a person sees at a terminal while a script works, and how Ctrl-C ends it early."""

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from itertools import groupby

import pytest
from helpers import ROOT, exit_code, fork
from tqdm import tqdm

import train
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import begin_script
from plaingpt.system.streams import print_line, status, warn

# that import torch; prepare.py may be done before Ctrl-C comes
SCRIPTS = ('train', 'sample', 'evaluate', 'export', 'plan', 'plot', 'bench')


class Screen:
    """The lines that a terminal of so many columns shows, and all that any line showed."""

    def __init__(self, columns=80):
        self.columns, self.lines, self.row, self.column, self.shown = columns, [''], 0, 0, []
        self.decode = codecs.getincrementaldecoder('utf-8')().decode
        self.incomplete = ''  # the beginning of a control sequence

    def feed(self, data):
        text = self.incomplete + self.decode(data)
        self.incomplete = re.search(r'(\x1b\[?)?$', text).group()
        for token in re.findall(r'\x1b\[[KA]|.', text.removesuffix(self.incomplete), re.DOTALL):
            line = self.lines[self.row]
            if token in ('\x1b[K', '\x1b[A', '\r', '\n'):
                self.shown.append(line.rstrip())
            if token == '\x1b[K':
                self.lines[self.row] = line[:self.column]
            elif token == '\x1b[A':
                self.row -= 1
            elif token == '\r':
                self.column = 0
            elif token == '\n':
                self.row += 1
                self.lines += [''] * (self.row == len(self.lines))
            else:
                assert token.isprintable(), repr(token)
                if self.column == self.columns:
                    self.row, self.column = self.row + 1, 0
                    self.lines += [''] * (self.row == len(self.lines))
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[:self.column] + token + line[self.column + 1:]
                self.column += 1


def open_terminal(columns=80):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    return master, slave


def read_all(terminal):
    """What comes until the command has closed its side."""
    with suppress(OSError), open(terminal, 'rb', buffering=0) as file:
        while piece := file.read(10_000):
            yield piece


def watch(main, *argv, columns=80):
    """Run a command at a terminal → (all that its lines showed, all lines, what it wrote)."""
    master, slave = open_terminal(columns)
    pid = fork(main, *argv, log=os.ttyname(slave))
    os.close(slave)
    written = b''.join(read_all(master))
    screen = Screen(columns)
    screen.feed(written)
    assert exit_code(pid) == 0, '\n'.join(screen.lines)
    return screen.shown, [line.rstrip() for line in screen.lines], written.decode()


def test_a_screen_takes_what_is_written_in_any_pieces():
    whole, bytewise = Screen(), Screen()
    written = '10/20 ━\r\x1b[Kwarning: é\r\n11/20'.encode()
    whole.feed(written)
    for byte in written:
        bytewise.feed(bytes([byte]))
    assert whole.lines == bytewise.lines == ['warning: é', '11/20']
    assert whole.shown == bytewise.shown


@pytest.mark.parametrize(('log_interval', 'columns'), [(1, 80), (3, 80), (1, 30)])
def test_the_last_line_says_where_a_run_stands_from_its_first_step_to_its_last(
        trained, tiny, monkeypatch, log_interval, columns):  # trained: here are all imports by now
    monkeypatch.setattr(train, 'write_report', lambda *_: None)
    shown, lines, written = watch(train.main, *tiny, f'--log_interval={log_interval}',
                                  '--report=True', columns=columns)
    steps = [re.match(r'(\d)/6 \| [━─]+', line) for line in shown]
    steps = [int(n) for n, _ in groupby(step[1] for step in steps if step)]
    assert steps == sorted(steps)  # between logged steps it is drawn now and then
    assert {n for n in range(7) if n == 1 or n % log_interval == 0} <= set(steps)
    # After each line that is printed meanwhile, it is drawn again.
    first, last = re.search(r'\d/6 \| ', written).start(), written.rindex('6/6 | ')
    ends = re.findall(r'\n(\r\d/6 \| )?', written[first:last + 6])
    assert len(ends) > 3 and all(ends)
    ends = {line.split('|')[-1].strip() for line in shown}
    assert 'setting up' in ends
    assert columns < 80 or {'evaluating', 'evaluating: sampling', 'saving'} <= ends
    # Afterwards there is no trace of it.
    assert lines[-1] == '' and not [line for line in lines if '─' in line or '━' in line]
    assert len([line for line in lines if line.startswith('iter ')]) == 6 // log_interval + 3


def test_lines_bars_warnings_and_threads_share_a_terminal_with_it():
    def main(argv):
        status.show('10/20', 'and so on')
        for _ in tqdm(range(3), 'bar', leave=False, mininterval=0):
            warn('a')
        with status.doing('x' * 200):
            thread = threading.Thread(target=lambda: [print_line(str(n)) for n in range(50)])
            thread.start()
            for n in range(50):
                print_line(str(100 + n))
            thread.join()
            print('plain')

    shown, lines, _ = watch(main)
    assert lines[:3] == ['warning: a'] * 3 and lines[103] == 'plain' and not any(lines[104:])
    assert sorted(map(int, lines[3:103])) == [*range(50), *range(100, 150)]
    assert {'10/20 | and so on', '10/20 | ' + 'x' * 71} <= {*shown}
    assert any('bar:' in line for line in shown)


def test_nothing_of_it_reaches_a_file_another_rank_or_help(tiny, tmp_path, monkeypatch):
    def main(argv):
        sys.argv = ['train.py', *argv]
        begin_script()
        print('imported')

    assert 'loading torch' in watch(main)[0]
    assert watch(main, '--help')[2] == 'imported\r\n'
    assert exit_code(fork(train.main, *tiny, log=tmp_path / 'log')) == 0
    text = (tmp_path / 'log').read_text()
    assert 'iter 6' in text and '\x1b' not in text and 'evaluating' not in text

    monkeypatch.setenv('RANK', '1')
    assert watch(main)[2] == 'imported\r\n'


@pytest.fixture
def heeds_ctrl_c():
    """Also where the tests themselves run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_while_torch_is_imported_a_terminal_says_so_and_ctrl_c_is_one_line(heeds_ctrl_c):
    for script in sorted({*SCRIPTS} - {'prepare', 'plot'}):  # which start without torch
        master, slave = open_terminal()
        process = subprocess.Popen([sys.executable, ROOT / f'{script}.py'], stdin=slave,
                                   stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        screen = Screen()
        for piece in read_all(master):
            screen.feed(piece)
            if 'loading torch' in screen.lines[-1]:
                process.send_signal(signal.SIGINT)
        assert (process.wait(60), screen.lines) == (130, ['interrupted', '']), script


def test_ctrl_c_while_a_run_is_set_up_is_one_line(tiny, tmp_path, heeds_ctrl_c):
    for name in ('open_data', 'assemble', 'open_batches'):
        def main(argv, name=name):
            original = getattr(train, name)

            def stopped(*arguments):
                result = original(*arguments)
                os.kill(os.getpid(), signal.SIGINT)
                return result
            setattr(train, name, stopped)
            train.main(argv)

        assert exit_code(fork(main, *tiny, log=tmp_path / 'log')) == 130
        text = (tmp_path / 'log').read_text()
        assert text.splitlines()[-1] == 'interrupted' and 'Traceback' not in text


def test_a_wish_to_stop_is_confirmed_at_once():
    def main(argv):
        with StopRequest():
            status.show('10/20')
            os.kill(os.getpid(), signal.SIGTERM)

    shown, lines, _ = watch(main)
    assert lines[0] == 'SIGTERM: stopping after this step' and '10/20' in shown
