"""The commands of README.md and docs/, and how the tests run each: `python tests/pages.py` lists
them all.

A line that starts with `$ ` in a block is a command, and what follows is its output, shortened
with `…`. A command in the text, `python script.py …`, is one too. A new command is run by default;
LEFT_OUT has those that are not, with the reason. A comment above a block says what it needs:

    <!-- needs: network -->   the tests give it a stand-in of the Hugging Face hub (hub.py)
    <!-- needs: gpu -->       they train a smaller model, on the CPU and in two processes
    <!-- needs: time -->      make test-slow runs it as it is
    <!-- needs: PACKAGE -->   above Python: it is run where that is installed
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# test_hacking.py applies the diffs of docs/hacking.md and runs its commands in the copy
PAGES = ['README.md', *sorted(f'docs/{path.name}' for path in (ROOT / 'docs').glob('*.md')
                              if path.name != 'hacking.md')]
SCRIPTS = ('prepare', 'train', 'sample', 'evaluate', 'export', 'plan', 'bench', 'plot', 'serve')
SHELL = ('echo', 'cat', 'cp', 'ls', 'mkdir', 'export', 'curl', 'hf')

LEFT_OUT = {  # pattern of a command: why no test runs it
    r'make (quickstart|test|test-slow|torture)\b': 'runs other commands of the pages, or the tests',
    r'python -m venv|pip install': 'installs packages; test_install.py compares their versions',
    r'wandb login|hf auth login': 'asks for a password',
    r'tensorboard --logdir|transformers serve|llama-': 'another program, which reads our files',
    r'git clone|python tools/compare.py': 'needs another repository, and minutes',
    r'python tools/first_step.py': 'takes the time of a recipe; see test_compare.py',
    r'quickstart_gpu|out-quickstart-gpu': 'takes 250 MB of source; test_compare.py trains it small',
    r'python data/openwebtext/prepare.py': "is nanoGPT's",
    r'torchrun --max-restarts=3 …': 'is part of a command',
    r'plot.py out-quickstart': 'compares a whole quickstart; see test_references.py',
    r'--variants=(grid|ablation|ladder)': 'trains by the dozen; test_runs.py reads these lists',
}
# of the README, for make test-slow alone: trainings by the dozen, jobs, and more of one kind
REPEATED = r'--sweep|^torchrun|^plaingpt train|/shakespeare_char(_cpu_best)?\.py|^python plan.py' \
           r'|chat'
SMALL = ['--max_iters=2', '--warmup_iters=1', '--lr_decay_iters=2', '--eval_interval=2',
         '--eval_iters=1', '--log_interval=1', '--block_size=32']
SMALL_BATCH = ['--batch_size=2', '--gradient_accumulation_steps=2', '--total_batch_size=0']
SMALL_MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=32']  # where no model is loaded
EXAMPLES = {  # what stands for a name in the text
    'python plan.py CONFIG': 'python plan.py config/tiny.py',
    'python bench.py CONFIG': 'python bench.py config/tiny.py',
    'config/NAME.py': 'config/tiny.py',
    '--dataset=NAME': '--dataset=chat',
    '--input=FOLDER': '--input=rows',
    'text FILES': 'text book.txt',
    'data/NAME': 'data/mine',
}


class Block(NamedTuple):
    needs: str  # of the comment above
    kind: str  # console, python
    text: str


class Command(NamedTuple):
    line: str
    output: list  # lines that the page shows
    needs: str  # of its block


def text_of(page):
    return (ROOT / page).read_text(encoding='utf-8')


def blocks_of(page):
    return [Block(*groups) for groups in re.findall(
        r'(?:<!-- needs: ([^>]*) -->\n)?```(\w*)\n(.*?)```', text_of(page), re.S)]


def commands_of(block):
    """The commands of a block, with what it shows of their output."""
    commands = []
    for line in block.text.replace('\\\n', ' ').splitlines():
        if line.startswith('$ '):
            commands.append(Command(line[2:], [], block.needs))
        elif commands:
            commands[-1].output.append(line)
    return commands


def commands_in_text(page):
    """The commands that stand in backquotes in the text and the tables of a page."""
    text = re.sub(r'```.*?```', '', text_of(page), flags=re.S)
    lines = [' '.join(line.split()) for line in re.findall(r'`([^`]+)`', text)]
    return [Command(line, [], 'text') for line in dict.fromkeys(lines)
            if re.match(r'(python|torchrun|make|plaingpt|pip|hf) \S', line)]


def all_commands(page):
    return [command for block in blocks_of(page) for command in commands_of(block)] \
        + commands_in_text(page)


def why_left_out(command):
    """The reason why no test runs a command, or None."""
    if any(line.startswith('error: preflight') for line in command.output):
        return 'shows a broken model.py; test_spoiled_code.py breaks it in more ways'
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, command.line)),
                None)


# -----------------------------------------------------------------------------
# how a command is given


def scripts_of(line):
    """'torchrun … train.py --a=1  # why' → [('train', ['--a=1'])], for scripts in the root."""
    words = shlex.split(line, comments=True)
    if words[0] == 'plaingpt':
        return [(words[1], words[2:])]
    return [(word[:-3], words[i + 1:]) for i, word in enumerate(words)
            if word.endswith('.py') and word[:-3] in SCRIPTS
            and words[0] in ('python', 'torchrun')][:1]


def given(command, shorter):
    """The line that the test gives for a command. shorter: in make test, where trainings have a
    tenth of their steps."""
    processes = 1 if '--nnodes=2' in command.line else 2
    line = re.sub(r'nproc_per_node=\d+', f'nproc_per_node={processes}', command.line)
    line = re.sub(r'--minutes=[\d.]+', '--minutes=0.1', line)
    if command.needs == 'text':
        for name, example in EXAMPLES.items():
            line = line.replace(name, example)
    many = '--sweep' in line or '--judge' in line  # trainings by the dozen
    if many or (shorter and command.needs in ('', 'time')):
        line = re.sub(r'--log_interval=\d+', '', line)
        line = re.sub(r'(--max_iters=\d+)0\b', r'\1 --eval_iters=9 --log_interval=10', line)
    for script, argv in scripts_of(line):
        if command.needs not in ('', 'time', 'terminal') or '--minutes' in line:
            line = ' '.join([shlex.join(shlex.split(line, comments=True)), *small(script, argv)])
    return line


def small(script, argv):
    """Options that end a command in seconds on a CPU."""
    if script == 'sample' and '--chat' not in argv:
        return ['--num_samples=1', '--max_new_tokens=20']
    if script == 'bench':
        return [*SMALL, *SMALL_BATCH, *SMALL_MODEL, '--steps=1']
    if script != 'train' or '--help' in argv:
        return []
    if '--minutes=0.1' in argv:
        return ['--eval_iters=1', *SMALL_BATCH, *SMALL_MODEL]
    if '--init_from=resume' in argv:
        return ['--max_iters=8', '--device=cpu']
    options = [*SMALL, '--device=cpu']
    options += ['--total_batch_size=128'] if '--batch_size=auto' in argv else SMALL_BATCH
    loads = re.search('finetune|--init_from=(?!auto)', ' '.join(argv))
    return options if loads else options + SMALL_MODEL


if __name__ == '__main__':
    for page in PAGES:
        for command in all_commands(page):
            why = why_left_out(command)
            print(page, command.line, f'not run: {why}' if why else
                  f'as {given(command, shorter=page == "README.md")}', sep=' | ')
