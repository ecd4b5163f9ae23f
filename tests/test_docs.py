"""README.md and docs/ stay true: their commands run, their links, options and names exist.

In a ```console block a line that starts with `$ ` is a command, and what follows is its output,
shortened with `…`. All commands of a page are run in order, in an empty folder that has what a
checkout has. Each page begins where the commands of the README end. `make test` follows the README
alone, with shorter trainings, and reads the options of all other commands. A comment above a block
says what it needs, and why it is not run:

    <!-- needs: time -->      make test-slow runs it
    <!-- needs: network -->   or gpu, terminal, files, datatrove: it is not run, but its options
                              are checked
"""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from _pytest.capture import FDCapture, MultiCapture
from helpers import ROOT

import train
from configurator import load_config
from plaingpt.system.errors import run_script

PAGES = ['README.md', *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md')
                              if path.name != 'hacking.md')]  # which test_hacking.py follows
COMMANDS = ('prepare', 'train', 'sample', 'evaluate', 'export', 'plan', 'bench', 'plot',
            'serve')
SHELL = ('echo', 'cat', 'cp', 'ls', 'mkdir')
# options of torchrun, hf, Slurm, tensorboard and llama.cpp, and --key=value itself
OF_OTHERS = {'nproc_per_node', 'nnodes', 'rdzv-backend', 'rdzv-endpoint', 'rdzv-id', 'rdzv-conf',
             'local-dir', 'repo-type',
             'max-restarts', 'standalone', 'gpus', 'gpus-per-node', 'cpus-per-task', 'nodes',
             'time', 'ntasks-per-node', 'requeue', 'open-mode', 'signal', 'logdir', 'help', 'key',
             'dependency', 'parsable', 'wrap', 'temp', 'jinja'}
MISTAKES = {'learning_rte', 'learing_rate', 'batchsize'}  # shown with the error that they get


class Block(NamedTuple):
    needs: str  # of the comment above
    kind: str  # console, python
    text: str


class Command(NamedTuple):
    line: str
    output: list  # lines that the page shows


def text_of(page):
    return (ROOT / page).read_text(encoding='utf-8')


def blocks_of(page):
    return [Block(*found) for found in re.findall(
        r'(?:<!-- needs: ([^>]*) -->\n)?```(\w*)\n(.*?)```', text_of(page), re.S)]


def commands_of(block):
    found = []
    for line in block.text.replace('\\\n', ' ').splitlines():
        if line.startswith('$ '):
            found.append(Command(line[2:], []))
        else:
            found[-1].output.append(line)
    return found


def scripts_of(line):
    """'torchrun … train.py --a=1  # why' → [('train', ['--a=1'])], for scripts in the root."""
    words = shlex.split(line, comments=True)
    return [(word[:-3], words[i + 1:]) for i, word in enumerate(words)
            if word.endswith('.py') and word[:-3] in COMMANDS
            and words[0] in ('python', 'torchrun')][:1]


def settings_of(script):
    """The dataclass of a script's settings."""
    module = importlib.import_module(script)
    if module is train:
        return train.TrainConfig
    return next(value for name, value in vars(module).items()
                if name.endswith('Config') and value.__module__ == script)


# -----------------------------------------------------------------------------
# commands run


def checkout(folder):
    """A new folder with what a checkout has for those who give commands."""
    folder.mkdir()
    for name in ('config', 'references'):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / 'docs', folder / 'docs')
    shutil.copy(ROOT / 'README.md', folder)
    (folder / 'data').mkdir()
    return folder


@pytest.fixture(scope='session')
def after_readme(tmp_path_factory):
    """A folder in which the commands of the README were given."""
    folder = checkout(tmp_path_factory.mktemp('docs') / 'plaingpt')
    with pytest.MonkeyPatch.context() as patch:
        follow('README.md', folder, patch)
    return folder


def follow(page, folder, patch, slow=False, shorter=False):
    """Give the commands of a page in `folder` and see that they do what it shows. slow: those too
    that take minutes; shorter: train a tenth of the iterations and evaluate less."""
    patch.chdir(folder)
    for backend in (torch.cuda, torch.backends.mps):
        patch.setattr(backend, 'is_available', lambda: False)
    for block in blocks_of(page):
        if block.needs and not (slow and block.needs == 'time'):
            continue
        if block.kind == 'python':
            exec(block.text, {})
        for command in commands_of(block) if block.kind == 'console' else ():
            many = re.search('--(sweep|judge)', command.line)  # trainings by the dozen
            code, output = give(shortened(command.line) if shorter or many else command.line)
            fails = any(line.startswith('error:') for line in command.output)
            missing = first_missing(command.output, output)
            assert code == (2 if fails else 0) and not missing, \
                f'{page}: $ {command.line}\nexit code {code}; not in its output: {missing!r}\n' \
                f'{output}'


def shortened(line):
    """A command that trains a tenth of the iterations, and evaluates less."""
    line = re.sub(r'--log_interval=\d+', '', line)
    return re.sub(r'(--max_iters=\d+)0\b', r'\1 --eval_iters=9 --log_interval=10', line)


def give(line):
    """Give a command → (exit code, all that it printed). Ours run in this process, which has
    imported torch already."""
    words = shlex.split(line, comments=True)
    if words[0] == 'python' and scripts_of(line):
        (script, argv), = scripts_of(line)
        return call(importlib.import_module(script).main, [f'{script}.py', *argv])
    if words[0] == 'torchrun':
        words = [sys.executable, '-m', 'torch.distributed.run',
                 *(str(ROOT / word) if word == 'train.py' else word for word in words[1:])]
        line = shlex.join(words)
    elif words[0] not in SHELL:
        return None, f'cannot be run by the test: say what it needs, or use {", ".join(SHELL)}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def call(main, argv):
    """Call a script's main → (exit code, all that it printed, and processes that it started)."""
    capture = MultiCapture(in_=None, out=FDCapture(1), err=FDCapture(2))
    capture.start_capturing()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', argv)
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


def test_commands_of_the_readme_do_what_it_shows(tmp_path, monkeypatch):
    follow('README.md', checkout(tmp_path / 'plaingpt'), monkeypatch, shorter=True)


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES[1:])
def test_commands_of_a_page_do_what_it_shows(page, after_readme, tmp_path, monkeypatch):
    shutil.copytree(after_readme, tmp_path / 'plaingpt', symlinks=True)
    follow(page, tmp_path / 'plaingpt', monkeypatch, slow=True)


@pytest.mark.parametrize('page', PAGES)
def test_commands_have_valid_options(page, char_data, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout(tmp_path / 'plaingpt'))
    Path('data/notes').symlink_to(char_data)
    for made_before in ('out-notes', 'nanoGPT/out-shakespeare-char/ckpt.pt'):
        Path(made_before).mkdir(parents=True)
    for block in blocks_of(page):
        for command in commands_of(block) if block.kind == 'console' else ():
            if any(line.startswith('error:') for line in command.output):
                continue
            for script, argv in scripts_of(command.line):
                argv = [arg for arg in argv if arg.startswith('-') or arg.endswith('.py')]
                assert load_config(settings_of(script), argv)  # raises UserError


# -----------------------------------------------------------------------------
# what pages name exists


def options_in(script):
    return {field.name for field in dataclasses.fields(settings_of(script))}


@pytest.mark.parametrize('page', PAGES)
def test_options_exist(page):
    known = OF_OTHERS.union(MISTAKES, *map(options_in, COMMANDS))
    tools = ''.join(path.read_text(encoding='utf-8') for path in (ROOT / 'tools').glob('*.py'))
    for name in set(re.findall(r'--([a-zA-Z][\w-]*)', without_urls(page))) - known:
        assert re.search(rf'--{name}\b|^    {name}:', tools, re.M), name


def without_urls(page):
    return re.sub(r'<!--.*?-->|https?://\S+|\]\([^)]*\)', '', text_of(page), flags=re.S)


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files_and_headings(page):
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
def test_files_and_functions_exist(page):
    text = without_urls(page)
    if page == 'docs/nanogpt.md':  # its left columns name nanoGPT's
        text = '\n'.join(line.partition(' | ')[2] for line in text.splitlines())
    for name in re.findall(r'\b((?:plaingpt|tools|config|references|results)/[\w/]*\.\w+)', text):
        assert (ROOT / name).exists() or name == 'references/NAME.csv' \
            or name == 'config/NAME.py', name
    code = ''.join(path.read_text(encoding='utf-8') for folder in ('', 'plaingpt/*')
                   for path in ROOT.glob(f'{folder}/*.py' if folder else '*.py'))
    for name in re.findall(r'`(\w+)\(\)`', text):
        assert re.search(rf'def {name}\b', code), name


def test_each_page_is_linked_from_the_readme():
    linked = re.findall(r'\]\((docs/\w+\.md)\)', text_of('README.md'))
    assert set(PAGES) <= {'README.md', *linked}


def test_extras_and_recipes_are_those_that_there_are():
    extras = text_of('docs/troubleshooting.md').partition('The extras are')[2]
    project = tomllib.loads(text_of('pyproject.toml'))['project']
    assert set(re.findall(r'`(\w+)`', extras)) == set(project['optional-dependencies']) - {'dev'}
    pages = ' '.join(map(text_of, PAGES))
    assert all(path.name in pages for path in ROOT.glob('config/*.py'))
