"""What a person sees at a terminal while a script works, and how Ctrl-C ends it early."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from helpers import ROOT, exit_code
from torture_streams import start
from tqdm import tqdm

import train
from plaingpt.system.distributed import StopRequest
from plaingpt.system.errors import begin_script
from plaingpt.system.streams import status, warn

SCRIPTS = ('train', 'prepare', 'sample', 'evaluate', 'export', 'plan', 'plot', 'bench')


class Screen:
    """The lines that a terminal of so many columns shows."""

    def __init__(self, columns):
        self.columns, self.lines, self.column = columns, [''], 0
        self.decode = codecs.getincrementaldecoder('utf-8')().decode

    def feed(self, data):
        for token in re.findall(r'\x1b\[K|.', self.decode(data), re.DOTALL):
            if token == '\x1b[K':
                self.lines[-1] = self.lines[-1][:self.column]
            elif token == '\r':
                self.column = 0
            elif token == '\n':
                self.lines.append('')
            else:
                assert token.isprintable(), repr(token)
                if self.column == self.columns:
                    self.lines.append('')
                    self.column = 0
                line = self.lines[-1].ljust(self.column)
                self.lines[-1] = line[:self.column] + token + line[self.column + 1:]
                self.column += 1


def open_terminal(columns):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    return master, slave


def watch(main, *argv, columns=80):
    """Run a command at a terminal → ([(its last line, seconds that it stood there)], all lines)."""
    master, slave = open_terminal(columns)
    pid = start(main, argv, os.ttyname(slave))
    os.close(slave)
    screen, seen, since = Screen(columns), [], time.perf_counter()
    while True:
        last = screen.lines[-1].rstrip()
        try:
            piece = os.read(master, 10_000)
        except OSError:  # the command has closed its side
            break
        now = time.perf_counter()
        seen.append((last, now - since))
        since = now
        screen.feed(piece)
    os.close(master)
    assert exit_code(pid) == 0, '\n'.join(screen.lines)
    return seen, [line.rstrip() for line in screen.lines]


@pytest.mark.parametrize(('log_interval', 'step_s', 'columns'), [(1, 0.02, 80), (10, 0.02, 80),
                                                                 (1, 0.3, 30)])
def test_the_last_line_says_where_a_run_stands_from_its_first_step_to_its_last(
        trained, tiny, log_interval, step_s, columns):  # trained: here are all imports by now
    original, steps = train.forward_backward, round(1.2 / step_s)

    def main(argv):
        def longer(*arguments):
            time.sleep(step_s)
            return original(*arguments)
        train.forward_backward = longer
        train.main(argv)

    seen, lines = watch(
        main, *tiny, f'--log_interval={log_interval}', f'--max_iters={steps}', '--sample_tokens=5',
        '--lr_decay_iters=200', f'--eval_interval={steps // 2}', columns=columns)
    stands = [bool(re.match(rf'\d+/{steps} \| [━─]+', last)) for last, _ in seen]
    first, end = stands.index(True), len(stands) - stands[::-1].index(True)
    shown = sum(seconds for (_, seconds), good in zip(seen, stands, strict=True) if good)
    whole = sum(seconds for _, seconds in seen[first:end])
    assert whole > 1.2 and shown > 0.9 * whole, seen
    ends = {last.split('|')[-1].strip() for last, _ in seen}
    assert 'setting up' in ends
    assert columns < 80 or {'evaluating: 0/2', 'evaluating: sampling', 'saving'} <= ends
    # Afterwards there is no trace of it.
    assert lines[-1] == '' and not [line for line in lines if '─' in line or '━' in line]
    logged = [line for line in lines if line.startswith('iter ')]
    assert len(logged) == steps // log_interval + 3


def test_lines_bars_warnings_and_threads_share_a_terminal_with_it():
    def main(argv):
        status.show('10/20', 'and so on')
        time.sleep(0.3)
        for _ in tqdm(range(3), 'bar', leave=False, mininterval=0):
            time.sleep(0.01)
        warn('a')
        with status.doing('x' * 200):
            thread = threading.Thread(
                target=lambda: [sys.stdout.write(f'{n}\n') for n in range(50)])
            thread.start()
            for n in range(50):
                sys.stdout.write(f'{100 + n}\n')
            thread.join()
        print('half', end='', flush=True)
        status.show('11/20')
        print(' whole')
        time.sleep(0.05)

    seen, lines = watch(main)
    numbers = [int(line) for line in lines[1:-2]]
    assert sorted(numbers) == [*range(50), *range(100, 150)]
    assert lines[0] == 'warning: a' and lines[-2:] == ['half whole', '']
    ends = [last for last, _ in seen]
    assert '10/20 | and so on' in ends and ends[-1] == '11/20' and any('bar:' in x for x in ends)


def test_nothing_of_it_reaches_a_file_another_rank_or_help(tiny, tmp_path,
                                                                        monkeypatch):
    def main(argv):
        sys.argv = ['train.py', *argv]
        begin_script()
        time.sleep(0.05)
        print('imported')

    assert 'loading torch' in {last for last, _ in watch(main)[0]}
    assert {last for last, _ in watch(main, '--help')[0]} == {''}
    assert exit_code(start(train.main, tiny, tmp_path / 'log')) == 0
    text = (tmp_path / 'log').read_text()
    assert 'iter 6' in text and '\x1b' not in text and 'evaluating' not in text

    monkeypatch.setenv('RANK', '1')
    assert {last for last, _ in watch(main)[0]} == {''}


def test_while_torch_is_imported_a_terminal_says_so_and_ctrl_c_is_one_line():
    for number, script in enumerate(SCRIPTS):
        master, slave = open_terminal(80)
        process = subprocess.Popen([sys.executable, ROOT / f'{script}.py'], stdin=slave,
                                   stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True)
        os.close(slave)
        screen = Screen(80)
        while 'loading torch' not in screen.lines[-1]:
            assert select.select([master], [], [], 60)[0]
            screen.feed(os.read(master, 1000))
        time.sleep(0.03 * number / len(SCRIPTS))  # one that imports no torch is soon done
        process.send_signal(signal.SIGINT)
        try:
            while piece := os.read(master, 1000):
                screen.feed(piece)
        except OSError:
            os.close(master)
        assert (process.wait(60), screen.lines) == (130, ['interrupted', ''])


def test_ctrl_c_while_a_run_is_set_up_is_one_line(tiny, tmp_path):
    for name in ('open_data', 'build_model', 'open_batches'):
        def main(argv, name=name):
            original = getattr(train.starting_point, name)

            def stopped(*arguments):
                result = original(*arguments)
                os.kill(os.getpid(), signal.SIGINT)
                return result
            setattr(train.starting_point, name, stopped)
            train.main(argv)

        assert exit_code(start(main, tiny, tmp_path / 'log')) == 130
        text = (tmp_path / 'log').read_text()
        assert text.endswith('\ninterrupted\n') and 'Traceback' not in text


def test_a_wish_to_stop_is_shown_until_the_step_is_over():
    def main(argv):
        with StopRequest():
            status.show('10/20')
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        status.show('stopped')
        time.sleep(0.3)

    ends = [last for last, _ in watch(main)[0]]
    assert 'SIGTERM: stopping after this step | 10/20' in ends and 'stopped' in ends
