"""README.md and docs/ stay true: their commands run, their links, options and names exist.

All commands of a page are given in order, in an empty folder that has what a checkout has; pages.py
says how. Each page begins where the commands of the README end. `make test` follows the README
alone, with shorter trainings, and reads the options of all other commands.
"""

import csv
import dataclasses
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pytest
from _pytest.capture import FDCapture, MultiCapture
from foreign_models import nanogpt_checkpoint, save_model, save_tokenizer
from hub import HUB
from pages import (
    LEFT_OUT,
    PAGES,
    REPEATED,
    SCRIPTS,
    SHELL,
    Command,
    all_commands,
    blocks_of,
    commands_in_text,
    commands_of,
    given,
    scripts_of,
    text_of,
    why_left_out,
)
from processes import PATIENCE_S, ROOT, ranks, wait_until
from runs import tick
from sample_data import write_tasks

import train
from configurator import load_config
from model import GPT, GPTConfig
from plaingpt.core.weights import PRETRAINED
from plaingpt.system.errors import run_script

# options of torchrun and Slurm in the text
OF_OTHERS = {'nproc_per_node', 'nnodes', 'rdzv-endpoint', 'rdzv-conf', 'max-restarts', 'requeue',
             'signal', 'help', 'key'}  # --key=value


def settings_of(script):
    """The dataclass of a script's settings."""
    module = importlib.import_module(script)
    if module is train:
        return train.TrainConfig
    return next(value for name, value in vars(module).items()
                if name.endswith('Config') and value.__module__ == script)


# -----------------------------------------------------------------------------
# what the commands meet


TEXT = ''.join(f'ROMEO:\nThe {i}th line of a play is not {i * i}.\n\n' for i in range(3000))
QUESTIONS = [(f'What is {i} + 1?', f'It is {i + 1}.') for i in range(40)]


def checkout(folder):
    """A new folder with what a checkout has for those who give commands."""
    folder.mkdir()
    (folder / 'config').symlink_to(ROOT / 'config')
    shutil.copytree(ROOT / 'docs', folder / 'docs')
    shutil.copy(ROOT / 'README.md', folder)
    (folder / 'data').mkdir()
    return folder


def write_own_files(folder, trained):
    """The files and runs that the pages take for a user's own."""
    downloaded = 'data/shakespeare/input.txt', 'data/shakespeare_char/input.txt'
    for name in ('book.txt', 'more.txt', 'input.txt', *downloaded,
                 *(f'notes/{i}.md' for i in range(40))):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{name}\n{TEXT}')
    table = '\n'.join(['prompt,completion', *map(','.join, QUESTIONS)])
    messages = ''.join(json.dumps({'messages': [
        {'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]}) + '\n'
        for question, answer in QUESTIONS)
    (folder / 'mine.py').write_text('learing_rate = 1e-3\n')
    (folder / 'questions.csv').write_text(table)
    (folder / 'mine.csv').write_text(table)
    (folder / 'chats.jsonl').write_text(messages)
    (folder / 'mine.jsonl').write_text(messages)
    for name, key in (('posts.jsonl', 'body'), ('rows/train.jsonl', 'text'),
                      ('corpus/a.jsonl', 'text')):
        write_rows(folder / name, key)
    lines = TEXT[:9000].splitlines()
    (folder / 'names.txt').write_text('\n'.join(lines))
    (folder / 'tunes.abc').write_text('\n\n'.join(lines))
    (folder / 'stories.txt').write_text('<|endoftext|>'.join(lines))
    with open(folder / 'tweets.csv', 'w', newline='') as file:
        csv.writer(file).writerows([*'12345', line] for line in lines)
    (folder / 'rows.jsonl').write_text(''.join(
        json.dumps({'input_ids': [*line.encode()]}) + '\n' for line in lines))
    datasets.Dataset.from_dict({'text': lines}).save_to_disk(folder / 'saved')
    for name in ('out', 'out-a', 'out-b'):
        shutil.copytree(trained, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        write_tasks(folder, patch)[0].rename(folder / 'mine.yaml')


def write_nanogpt(folder):
    """What somebody has who trained with nanoGPT."""
    old = folder / 'nanoGPT'
    (old / 'config').mkdir(parents=True)
    (old / 'config/train_shakespeare_char.py').write_text(
        "out_dir = 'out-shakespeare-char'\ndataset = 'shakespeare_char'\ndropout = 0.2\n")
    shutil.copytree(folder / 'data/shakespeare_char', old / 'data/shakespeare_char')
    vocab_size = json.loads((old / 'data/shakespeare_char/meta.json').read_text())['vocab_size']
    (old / 'out-shakespeare-char').mkdir()
    nanogpt_checkpoint(old / 'out-shakespeare-char/ckpt.pt',
                       GPT(GPTConfig(64, vocab_size, 1, 2, 32, mlp='gelu_erf')))


def write_rows(path, key):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps({key: f'{i}. {TEXT[:500]}'}) + '\n' for i in range(400)))


def fill_hub(patch):
    """What the pages take from the hub, and small: models as OpenAI and others publish them, and
    corpora and benchmarks of a few rows."""
    from transformers import GPT2Config, GPT2LMHeadModel
    for name in PRETRAINED:
        patch.setitem(PRETRAINED, name, GPTConfig(n_layer=1, n_head=2, n_embd=32))
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32)).save_pretrained(
            HUB.model(f'openai-community/{name}'))
    smollm = HUB.model('HuggingFaceTB/SmolLM2-360M')
    save_tokenizer(smollm, 'smollm2', [TEXT])
    save_model(smollm, 'smollm2', max_position_embeddings=1024)
    write_rows(HUB.dataset('Skylion007/openwebtext@refs/convert/parquet') / 'train.jsonl', 'text')
    fineweb = HUB.dataset('HuggingFaceFW/fineweb-edu')
    write_rows(fineweb / 'sample-10BT/train.jsonl', 'text')
    (fineweb / 'README.md').write_text('---\nconfigs:\n- config_name: sample-10BT\n  data_files: '
                                       'sample-10BT/*\n---\n')
    write_rows(HUB.dataset('OWNER/NAME') / 'train.jsonl', 'body')
    write_rows(HUB.dataset('EleutherAI/lambada_openai') / 'test.jsonl', 'text')
    choice = {'activity_label': 'Acting', 'ctx_a': 'A man', 'ctx_b': 'he', 'label': '1',
              'endings': ['leaves.', 'speaks.', 'sings.', 'dies.']}
    for split in ('train', 'validation'):
        (HUB.dataset('Rowan/hellaswag') / f'{split}.jsonl').write_text(json.dumps(choice) + '\n')
    for split in ('train', 'val'):
        write_header(HUB.dataset('kjj0/fineweb10B-gpt2') / f'fineweb_{split}_000000.bin', 4000)


def write_header(path, size):
    """A shard of GPT-2 tokens as llm.c has them."""
    header = np.zeros(256, '<i4')
    header[:3] = 20240520, 1, size
    path.write_bytes(header.tobytes() + (np.arange(size) % 500).astype('<u2').tobytes())


# -----------------------------------------------------------------------------
# commands run


@pytest.fixture(scope='session')
def after_readme(trained, tmp_path_factory):
    """A folder in which the commands of the README were given."""
    folder = checkout(tmp_path_factory.mktemp('docs') / 'plaingpt')
    follow('README.md', folder, trained)
    return folder


def is_installed(package):
    return not package or find_spec(package) is not None


def follow(page, folder, trained, shorter=False):
    """Give the commands of a page in `folder`, and see that they do what it shows. shorter: in
    make test."""
    with pytest.MonkeyPatch.context() as patch, HUB.emptied(), ExitStack() as servers:
        patch.chdir(folder)
        patch.setenv('WANDB_MODE', 'offline')
        tick(patch)
        patch.setenv('PYTHONPATH', str(ROOT), prepend=os.pathsep)
        fill_hub(patch)
        if not (folder / 'book.txt').exists():
            write_own_files(folder, trained)
        if 'nanoGPT/out' in text_of(page):
            write_nanogpt(folder)
        for block in blocks_of(page):
            if block.kind == 'python' and is_installed(block.needs):
                exec(re.sub(r'tasks=\d+, workers=\d+', 'tasks=2, workers=1', block.text),
                     {'__name__': '__main__'})
            for command in commands_of(block):
                check(page, command, patch, servers, shorter)
        for command in commands_in_text(page):
            check(page, command, patch, servers, shorter)


def check(page, command, patch, servers, shorter):
    """Give a command, and what prepare.py says comes next."""
    if why_left_out(command) or (shorter and re.search(REPEATED, command.line)):
        return
    line = given(command, shorter)
    if prepared := re.search(r'prepare.py (?!inspect)(\w+)', line):
        folder = re.search(r'--data_dir=(\S+)|$', line)[1] or f'data/{prepared[1]}'
        if Path(folder, 'meta.json').exists():  # of a command that somebody else gives
            line += ' --overwrite'
    code, output = give(line, patch, servers)
    fails = any(line.startswith('error:') for line in command.output)
    missing = first_missing(command.output, output)
    assert code == (2 if fails else 0) and not missing, \
        f'{page}: $ {line}\nexit code {code}; not in its output: {missing!r}\n{output}'
    # The README has the same trainings: make test gives them once.
    for following in [] if shorter else re.findall('^next: (python train.py .*)$', output, re.M):
        check(page, Command(f'{following} --out_dir=out-next', [], 'text'), patch, servers, shorter)


def give(line, patch, servers):
    """Give a command → (exit code, all that it printed). Ours run in this process, which has
    imported torch already. patch, servers: of the page"""
    words = shlex.split(line, comments=True)
    if words[0] == 'export':
        patch.setenv(*words[1].split('='))
        return 0, ''
    if 'serve.py' in words and '--help' not in words:
        return start_server(line, patch, servers)
    if words[0] == 'python' and scripts_of(line):
        (script, argv), = scripts_of(line)
        return call(importlib.import_module(script).main, [f'{script}.py', *argv])
    if words[0] not in ('torchrun', 'plaingpt', *SHELL):
        return None, f'cannot be run by the test: say why not, in pages.py, or use {SHELL}'
    words = [str(ROOT / word) if word[:-3] in SCRIPTS else word for word in words]
    if words[0] != 'torchrun':
        start = {'plaingpt': [sys.executable, '-m', 'plaingpt'],
                 'hf': [str(Path(sys.executable).with_name('hf'))]}.get(words[0])
        line = shlex.join([*start, *words[1:]]) if start else \
            line.replace(':8000', f':{os.environ.get("PORT")}')
        return run_shell([line])
    port = ranks(1)[0]['MASTER_PORT']
    words = [sys.executable, '-m', 'torch.distributed.run',
             *(re.sub(r'10\.0\.0\.1:\d+', f'127.0.0.1:{port}', word) for word in words[1:])]
    machines = int(re.search(r'--nnodes=(\d+)|$', line)[1] or 1)
    return run_shell([shlex.join(words)] * machines)


def run_shell(lines):
    """Give commands at the same time → (exit code of the last, all that they printed)."""
    started = [subprocess.Popen(line, shell=True, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT) for line in lines]
    output = ''.join(process.communicate(timeout=PATIENCE_S)[0] for process in started)
    return max(process.returncode for process in started), output


def start_server(line, patch, servers):
    """Start serve.py, which runs until the commands of the page end → (0, what it printed)."""
    port = ranks(1)[0]['MASTER_PORT']
    patch.setenv('PORT', port)
    line = line.replace('python serve.py', f'exec {sys.executable} {ROOT}/serve.py --port={port}')
    log = open('server.log', 'w+')
    server = subprocess.Popen(line, shell=True, stdout=log, stderr=subprocess.STDOUT)
    servers.callback(server.wait)
    servers.callback(server.terminate)
    wait_until(lambda: 'Uvicorn running' in Path(log.name).read_text() or server.poll())
    return server.poll() or 0, Path(log.name).read_text()


def call(main, argv):
    """Call a script's main → (exit code, all that it printed, and processes that it started)."""
    capture = MultiCapture(in_=None, out=FDCapture(1), err=FDCapture(2))
    capture.start_capturing()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', argv)
            patch.setattr(sys, 'stdin', io.StringIO('What is 7 + 8?\n/quit\n'))
            run_script(main)
        code = 0
    except SystemExit as e:
        code = e.code or 0
    finally:
        printed = ''.join(capture.readouterr())
        capture.stop_capturing()
    return code, printed


def first_missing(shown, output):
    """The first line that a page shows and the output has not, in this order; None if it has all.

    Numbers may differ, and `…` stands for anything.
    """
    lines = iter([fixed_words(line) for line in output.splitlines()])
    for line in shown:
        if line.strip() in ('', '…'):
            continue
        pattern = '.*'.join(map(re.escape, fixed_words(line).split('…')))
        if not any(re.fullmatch(pattern, actual) for actual in lines):
            return line
    return None


def fixed_words(line):
    """A line without its numbers, durations, and the spaces that align them."""
    line = re.sub(r'– \|', '0 |', line)  # a figure that there is not
    line = re.sub(r'[-+]?\d[\d,.]*(e[-+]?\d+)?([kMGT]\b)?', '0', line)
    line = re.sub(r'\b(0[dhms])+\b', '0s', line)
    return re.sub(r'[\s-]+', ' ', line).strip()


def test_the_commands_of_the_readme_work(trained, tmp_path):
    follow('README.md', checkout(tmp_path / 'plaingpt'), trained, shorter=True)  # asserts


@pytest.mark.slow
# test_chat.py and test_notebook.py run two of them
@pytest.mark.parametrize('page', sorted({*PAGES} - {'README.md', 'docs/chat.md',
                                                    'docs/how-it-trains.md'}))
def test_the_commands_of_a_page_work(page, trained, after_readme, tmp_path):
    shutil.copytree(after_readme, tmp_path / 'plaingpt', symlinks=True)
    follow(page, tmp_path / 'plaingpt', trained)  # asserts


@pytest.mark.parametrize('page', PAGES)
def test_a_precision_is_shown_only_where_the_command_names_it_or_a_gpu(page):
    for command in all_commands(page):
        if re.search(r'float(16|32)', ' '.join(command.output)):
            assert re.search(r'--(dtype|gpu)', command.line), command.line


@pytest.mark.parametrize('pattern', LEFT_OUT)
def test_what_is_left_out_is_on_a_page(pattern):
    assert any(re.search(pattern, command.line) for page in PAGES for command in all_commands(page))


@pytest.mark.parametrize('page', PAGES)
def test_the_options_of_commands_are_valid(page, char_data, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout(tmp_path / 'plaingpt'))
    Path('data/notes').symlink_to(char_data)
    for made_before in ('out-notes', 'nanoGPT/out-shakespeare-char/ckpt.pt', 'nanoGPT/config'):
        Path(made_before).mkdir(parents=True)
    Path('nanoGPT/config/train_shakespeare_char.py').touch()
    for command in all_commands(page):
        if why_left_out(command) or any(line.startswith('error:') for line in command.output):
            continue
        for script, argv in scripts_of(given(command, shorter=False)):
            argv = [arg for arg in argv if arg.startswith('-') or arg.endswith('.py')]
            if '--help' not in argv:
                assert load_config(settings_of(script), argv)  # raises UserError


# -----------------------------------------------------------------------------
# what pages name exists


@pytest.mark.parametrize('page', PAGES)
def test_options_in_the_text_exist(page):
    known = OF_OTHERS.union(*({field.name for field in dataclasses.fields(settings_of(script))}
                              for script in SCRIPTS))
    tools = ''.join(path.read_text(encoding='utf-8') for path in (ROOT / 'tools').glob('*.py'))
    text = re.sub(r'```.*?```', '', without_urls(page), flags=re.S)
    for name in set(re.findall(r'--([a-zA-Z][\w-]*)', text)) - known:
        assert re.search(rf'--{name}\b|^    {name}:', tools, re.M), name


def without_urls(page):
    return re.sub(r'<!--.*?-->|https?://\S+|\]\([^)]*\)', '', text_of(page), flags=re.S)


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_somewhere(page):
    for text, target in re.findall(r'\[([^]]*)\]\(([^)\s]+)\)', text_of(page)):
        if target.startswith('http'):
            continue
        path, _, heading = target.partition('#')
        path = (ROOT / page).parent / path if path else ROOT / page
        assert path.exists(), f'[{text}]({target})'
        if heading:
            assert heading in headings_of(path), f'[{text}]({target})'


def headings_of(path):
    """The anchors that GitHub makes of the headings of a page."""
    text = re.sub(r'```.*?```', '', path.read_text(encoding='utf-8'), flags=re.S)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
            for heading in re.findall(r'^#+ (.*)$', text, re.M)}


@pytest.mark.parametrize('page', PAGES)
def test_files_exist(page):
    for name in re.findall(r'\b((?:plaingpt|tools|config|references|results)/[\w/]*\.\w+)',
                           text_about_us(page)):
        assert (ROOT / name).exists() or Path(name).stem == 'NAME', name


@pytest.mark.parametrize('page', PAGES)
def test_functions_exist(page):
    code = ''.join(path.read_text(encoding='utf-8')
                   for path in [*ROOT.glob('*.py'), *ROOT.glob('plaingpt/*/*.py')])
    for name in re.findall(r'`(\w+)\(\)`', text_about_us(page)):
        assert re.search(rf'def {name}\b', code), name


def text_about_us(page):
    if page != 'docs/nanogpt.md':
        return without_urls(page)
    return '\n'.join(line.partition(' | ')[2] for line in without_urls(page).splitlines())


@pytest.mark.parametrize('page, limit', [('README.md', 1200), ('docs/how-it-trains.md', 2500)])
def test_a_page_to_read_at_once_is_short(page, limit):
    assert len(text_of(page).split()) <= limit


def test_each_page_is_linked_from_the_readme():
    linked = re.findall(r'\]\((docs/[\w-]+\.md)\)', text_of('README.md'))
    assert set(PAGES) <= {'README.md', *linked}


def test_the_extras_are_named():
    extras = text_of('docs/troubleshooting.md').partition('The extras are')[2]
    project = tomllib.loads(text_of('pyproject.toml'))['project']
    assert set(re.findall(r'`(\w+)`', extras)) == set(project['optional-dependencies']) - {'dev'}


def test_each_recipe_is_on_a_page():
    pages = ' '.join(map(text_of, PAGES))
    assert all(path.name in pages for path in ROOT.glob('config/*.py'))


# -----------------------------------------------------------------------------
# what the README counts


def test_the_readme_counts_scripts_and_lines():
    def lines_of(*paths):
        return sum(path.read_text(encoding='utf-8').count('\n') for path in paths)
    introduction = ' '.join(text_of('README.md').partition('\n## ')[0].split())
    counts = re.findall(r'([\d,]+) (?:scripts|lines)', introduction)
    scripts = [*ROOT.glob('*.py')]
    assert [int(count.replace(',', '')) for count in counts] == pytest.approx([  # rounded
        len(scripts), lines_of(*scripts), lines_of(ROOT / 'model.py', ROOT / 'train.py'),
        lines_of(*ROOT.glob('plaingpt/**/*.py'))], rel=0.03)
