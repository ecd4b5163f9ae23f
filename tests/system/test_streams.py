"""Standard streams, full disks, the text of others: they cost no work and command no terminal."""

import errno
import os
import pty
import resource
import signal
import subprocess
import sys
import unicodedata
from contextlib import suppress

import pytest
from helpers import ROOT, exit_code, fails, fork, run
from tqdm import tqdm

import export
import sample
import train
from plaingpt.monitoring import curves, markdown_report
from plaingpt.system.files import append_line
from plaingpt.system.formatting import printable
from plaingpt.system.streams import TolerantFile, require_stdout, warn

HOSTILE = 'a\x1b]0;title\x07b\rc\x9b31m\u202ed'


def test_a_process_killed_while_it_prints_holds_up_no_other(tmp_path):
    def killed(argv):
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(fork(killed, log=tmp_path / 'log')) == -signal.SIGKILL
    assert exit_code(fork(lambda argv: warn('on'), log=tmp_path / 'log')) == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_loses_nothing():
    out = run(ROOT / 'tools/torture.py', 'disks', '--disks=1', '--seed=3')
    assert 'nothing was lost' in out and 'disks: 1 rounds' in out


def test_what_is_printable_holds_no_control_character_but_tab_and_line_end():
    everything = ''.join(map(chr, range(2**16)))
    kept = {c for c in printable(everything) if unicodedata.category(c) in ('Cc', 'Cs')}
    assert kept == {'\t', '\n'}
    overrides = {c for c in everything if unicodedata.bidirectional(c) in (
        'LRO', 'RLO', 'LRE', 'RLE', 'PDF', 'LRI', 'RLI', 'FSI', 'PDI')}
    assert len(overrides) == 9 and not overrides & set(printable(everything))
    assert printable('Grüße\t→ 中\r\n') == 'Grüße\t→ 中\r\n'


def read_terminal(main, *argv):
    """What a terminal receives from a command."""
    master, slave = pty.openpty()
    pid = fork(main, *argv, log=os.ttyname(slave))
    os.close(slave)
    seen = b''
    with suppress(OSError), open(master, 'rb', buffering=0) as terminal:
        while piece := terminal.read(10_000):  # until the command has closed its side
            seen += piece
    return exit_code(pid), seen.decode().replace('\r\n', '\n')


def test_a_terminal_gets_no_control_character_of_text_names_and_warnings(tmp_path):
    def main(argv):
        require_stdout(verbatim=True)
        print(HOSTILE)
        warn(HOSTILE)
        raise FileNotFoundError(errno.ENOENT, 'nothing there', HOSTILE)

    code, seen = read_terminal(main)
    assert code == 2 and seen.count(r'a\x1b]0;title\x07b\rc\x9b31m\u202ed') == 3
    assert seen.replace('\n', '').isprintable(), seen
    assert seen.splitlines()[-1].startswith('error: ') and 'nothing there' in seen


def test_texts_in_a_file_are_as_the_model_wrote_them(tmp_path):
    def main(argv):
        if argv:
            require_stdout(verbatim=True)
        print(HOSTILE)

    for argv, expected in (([], printable(HOSTILE)), (['verbatim'], HOSTILE)):
        log = tmp_path / f'log-{len(argv)}'
        assert exit_code(fork(main, *argv, log=log)) == 0
        assert log.read_bytes().decode() == expected + '\n'


def test_a_reader_that_goes_away_is_no_failure_and_a_full_disk_is_one_line():
    gone, broken = os.pipe()
    os.close(gone)
    full = os.open('/dev/full', os.O_WRONLY)
    for out, expected in ((broken, ''),
                          (full, 'error: standard output: No space left on device\n')):
        done = subprocess.run([sys.executable, ROOT / 'prepare.py'], stdout=out, text=True,
                              stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (1, expected)
        os.close(out)


def test_lines_arrive_again_when_there_is_room_again(tmp_path):
    with open('/dev/full', 'w') as full, open(tmp_path / 'log', 'w') as log:
        file = TolerantFile(os.dup(full.fileno()), 'w')
        assert file.write(b'lost\n') == 5
        os.dup2(log.fileno(), file.fileno())
        file.write(b'after\n')
    assert (tmp_path / 'log').read_text() == 'after\n'


def limit_files(size):
    """Let no file of this process grow past `size`, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_row_that_does_not_fit_leaves_no_half_of_itself(tmp_path):
    def main(argv):
        limit_files(50)
        for number in (1, 2, 33333333333333333333333333333333333, 4):
            append_line(tmp_path / 'rows', {'number': number})

    assert exit_code(fork(main, log=tmp_path / 'log')) == 0
    assert (tmp_path / 'rows').read_text() == ''.join(f'{{"number": {n}}}\n' for n in (1, 2, 4))
    assert 'a line of ' in (tmp_path / 'log').read_text()


def test_what_the_system_refuses_is_one_line_that_names_the_file(trained, tmp_path, capsys,
                                                                 monkeypatch):
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "def"}\n')
    commands = {
        'hf': (export.main, [f'--out_dir={trained}', f'--dest={tmp_path}/hf']),
        'texts': (sample.main, [f'--out_dir={trained}', f'--prompts={tmp_path}/prompts.jsonl',
                                f'--output={tmp_path}/texts', '--max_new_tokens=10'])}
    for name, (main, argv) in commands.items():
        def limited(argv, main=main):
            limit_files(20)
            main(argv)

        reader, writer = os.pipe()  # which has no limit
        assert exit_code(fork(limited, *argv, log=f'/dev/fd/{writer}')) == 2
        os.close(writer)
        with open(reader) as log:
            error = log.read().splitlines()[-1]
        assert error.startswith('error: ') and f'{tmp_path}/{name}' in error, error
        assert 'too large' in error
    folder = tmp_path / 'folder'
    folder.mkdir()

    def main(argv):
        folder.read_text()
    assert fails(capsys, monkeypatch, main) == f'error: {folder}: Is a directory'


def test_nothing_that_a_report_raises_changes_how_a_run_ends(tiny, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError('no such number\nat all')

    monkeypatch.setattr(curves, 'draw_runs', fail)
    monkeypatch.setattr(markdown_report, 'format_report', fail)
    train.main([*tiny, '--max_iters=1', '--report=True'])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if 'warning' in line] == [
        f'warning: no {name}: no such number' for name in ('loss.png', 'report.md')]


def test_a_run_of_any_name_is_reported_and_resumed(tiny, tmp_path):
    out, log = tmp_path / 'cost$5_$6 \x1b[2J', tmp_path / 'log'
    for argv in (['--max_iters=1'], ['--max_iters=2', '--init_from=resume', '--report=True']):
        argv = [*tiny, f'--out_dir={out}', '--check=False', '--eval_interval=2', *argv]
        assert exit_code(fork(train.main, *argv, log=log)) == 0
    assert (out / 'loss.png').exists() and 'warning' not in log.read_text()
    assert (out / 'report.md').read_text().startswith(f'# {printable(out.name)}\n')
