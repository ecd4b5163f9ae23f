"""A command line of odd values ends with exit code 0, or with 2 and `error:` lines.

Each case comes from a seed. The commands run in forks, without a network, on a tiny dataset and a
tiny model. A value that is large and allowed, such as a number of samples, would run on for
hours: the test ends such a case after RUNS_ON_S seconds of computing.
"""

import dataclasses
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY, exit_code, fork, options, without_index
from test_docs import COMMANDS, settings_of

import plot
from configurator import accepted_types
from plaingpt.experiments import step_speed

CASES = 1000  # of each command
RUNS_ON_S = 2
MAY_RUN_ON = 30  # of the cases of a command
NUMBERS = ['-1', '0', '1', '2', '3', '1000', '-2**62', '1e18', '-1e18', '1e-300', '1e308', '3e38',
           '0.5', '.5', '-0.0', '1e3', '0x10', '1_000', '01', '1e400', 'nan', 'inf', '-inf', 'NaN',
           '1j', '2147483648', str(2**40), str(2**62), str(-2**62), str(2**63 - 1), str(2**64),
           '1' + '0' * 400, '9' * 5000, '-' + '9' * 400, '١٢', '１', '²', '½', '1/0', '10**400']
TEXTS = ['', ' ', '\t', '\n', '\r\n', 'a\nb', '\0', 'a\0b', '\ud800', 'a\udcff', '\ufeff',
         '\x1b[2J', '\u202e', '\\', '\\n', '\\x', '\\ud800', "'", '"', '%s', '%', '{}', '{',
         '{user}',
         '{0}', 'true', 'False', 'None', 'null', 'auto', 'x' * 300, 'é' * 200, 'a/' * 3000,
         'x' * 70000]
LITERALS = ['{[]:1}', '{1:2,1:3}', '[1]*9', '[', '["a"]', '[""]', '[1]', '[[]]', '{"a":1}', '()',
            '(1,)', '{1}', 'b"x"', '...', '1+1j', '+'.join('1' * 20000), '(' * 300, '[' * 20000,
            '-' * 20000 + '1', 'lambda: 0', "__import__('os')", '1 if 1 else 2', 'f"{1}"',
            '"a" "b"']
PATHS = ['.', '..', '../..', '/', '/dev/null', '/dev/full', '/dev/null/x', 'no/such/file',
         'folder',
         'file', 'file/x', 'empty', 'binary', './', '~', '$HOME', '*', '**', '[a-', '?', ',',
         'a,b',
         ':', 'a:b', 'a:0.5', 'a:nan,b:1', 'a:0', ':1', 'folder:1,file:2', '-', '--', '=', '==',
         'FILE:', 'FILE:file', 'FILE:no', 'FILE:/dev/null', 'FILE:.', 'FILE:binary', 'FILE:\0',
         'http://[', 'a/b', 'gpt2', '::1', '[::1]', '256.1.1.1', 'x' * 300 + '.png',
         'no/such/a.png', 'a\udcff.png', '.png', 'a.json', 'a.jsonl', 'x' * 300 + '.py',
         'binary.py', '1/1', '2/1', '0/0', '９/９', 'char', 'byte', 'bpe', 'bpe:', 'bpe:1', 'bpe:²',
         'bpe:300', '1.5B', '5e3k',
         'cuda', 'cuda:99', 'cuda:²', 'mps', 'val,val', 'val,', 'lambada', 'latest', 'best']
ODD = NUMBERS + TEXTS + LITERALS + PATHS


def is_word(text):
    """Whether a system can pass it to a command."""
    return not {'\0', '\ud800'} & set(text)


def cases(command, bases):
    """Yield the same command lines each time: a base and one to three settings of odd values, and
    now and then a word that is no setting."""
    rng = random.Random(command)
    settings = settings_of(command)
    names = [field.name for field in dataclasses.fields(settings)]
    for _ in range(CASES):
        words = []
        for name in rng.choices(names, k=rng.choice([1, 1, 1, 2, 3])):
            choices = [str(kind) for kind in accepted_types(settings, name)
                       if not isinstance(kind, type)]
            words.append(f'--{name}={rng.choice(rng.choice([ODD, NUMBERS, choices or TEXTS]))}')
        if rng.random() < 0.1:
            word = rng.choice([odd for odd in ODD if is_word(odd)])
            name = rng.choice(names)
            words.insert(rng.randint(0, len(words)), rng.choice([
                word, f'--{name}', f'--{name.upper()}={word}', f'--{word}=1', f'{name}={word}',
                f'-{name}={word}', f'--{name}[0]={word}', f'--{name}=[']))
        yield [*rng.choice(bases), *words]


def outcome(main, argv, log):
    """Run a command in a fork → what is wrong with how it ended, or '', and whether it ran on. The
    system ends it by the time that it computed: how busy the machine is changes nothing."""
    def before():
        sys.stdin = open(os.devnull, encoding='utf-8')
        signal.setitimer(signal.ITIMER_PROF, RUNS_ON_S)

    code = exit_code(fork(main, *argv, log=log, before=before))
    if code == -signal.SIGPROF:
        return '', True
    printed = log.read_text(encoding='utf-8', errors='replace')
    _, begun, errors = f'\n{printed}'.partition('\nerror: ')
    is_told = begun and all(line.startswith('error: ') for line in errors.splitlines()[1:])
    right = code == 0 or (code == 2 and is_told)
    return '' if right and 'Traceback' not in printed else f'exit code {code}: {printed}', False


@pytest.fixture
def bases(char_data, trained, text_file, tmp_path, monkeypatch):
    """{command: the command lines that odd values are added to}. Nothing is served, drawn, compiled
    or downloaded, and no process is started."""
    def refuse(*_, **__):
        raise OSError('no network and no process')

    def resolve(host, port, family=0, type=0, proto=0, flags=0):
        return getaddrinfo(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)

    getaddrinfo = socket.getaddrinfo
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(socket, 'getaddrinfo', resolve)
    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(subprocess, 'run', refuse)
    monkeypatch.setattr(torch, 'compile', lambda model, **_: model)
    monkeypatch.setattr('uvicorn.Server.run', lambda server: None)
    monkeypatch.setattr(plot, 'draw_curves',
                        lambda runs, path, reference: Path(path).write_bytes(b'') or [path])
    without_index(monkeypatch)
    matmul_flops = step_speed.matmul_flops
    monkeypatch.setattr(step_speed, 'matmul_flops',
                        lambda dtype, device, size=64: matmul_flops(dtype, device, size=64))
    text = tmp_path / 'text.txt'
    text.write_text(text_file.read_text(encoding='utf-8')[:3000], encoding='utf-8')
    chat = tmp_path / 'chat.jsonl'
    chat.write_text('{"prompt": "Who?", "completion": "You."}\n' * 9, encoding='utf-8')
    run, data = f'--out_dir={trained}', f'--dataset={char_data}'
    tiny = [*TINY, data]
    return {
        'train': [[*tiny, '--check']],
        'prepare': [['text', f'--input={text}', '--tokenizer=char'],
                    ['text', f'--input={text}', '--tokenizer=byte', '--documents=paragraph'],
                    ['hf', '--path=a/b'], ['openwebtext'], ['finewebedu10B_gpt2'],
                    ['chat', f'--input={chat}', '--tokenizer=byte'], ['inspect'], ['merge'], []],
        'sample': [[run, *options(max_new_tokens=1, num_samples=1)]],
        'evaluate': [[run, '--split=val'], [run, '--tasks=text', f'--data={text}'],
                     [run, '--tasks=val', '--limit=1']],
        'export': [[run, '--dest=new'], [run, '--dest=new', '--format=gguf']],
        'plan': [[*tiny, '--tokens_per_s=1000'],
                 [*tiny, '--gpu_memory_gb=24', '--processes=2', '--json']],
        'bench': [[*tiny, *options(steps=1, warmup_steps=0, rounds=1, seeds=1)]],
        'plot': [[str(trained)]],
        'serve': [[run, '--port=0']],
    }


@pytest.mark.slow
@pytest.mark.parametrize('command', COMMANDS)
def test_no_odd_value_ends_a_command_in_a_traceback(command, bases, tmp_path):
    main, wrong, ran_on = __import__(command).main, [], []
    for number, argv in enumerate(cases(command, bases[command])):
        folder = tmp_path / 'outer' / 'middle' / 'inner'
        (folder / 'folder').mkdir(parents=True)
        for name, content in (('file', b'text'), ('empty', b''), ('binary', b'\x80\0' * 9),
                              ('binary.py', b'\x80\0')):
            (folder / name).write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            problem, too_long = outcome(main, argv, tmp_path / 'log')
        shutil.rmtree(tmp_path / 'outer')
        line = f'case {number}: {ascii(argv)[-300:]}'
        wrong += [f'{line}\n  {problem[-1000:]}'] if problem else []
        ran_on += [line] if too_long else []
    assert not wrong, '\n'.join([f'{len(wrong)} of {CASES}', *wrong])
    assert len(ran_on) <= MAY_RUN_ON, '\n'.join(ran_on)
