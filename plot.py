"""Draw the curves of runs, say what looks wrong, and compare with a reference; show their films.

    python plot.py out
    python plot.py out-a out-b --output=both.png
    python plot.py out --reference=shakespeare_char_cpu
    python plot.py out --live
    python plot.py --film out out-b
"""

if __name__ == '__main__':
    from plaingpt.system.errors import begin_script
    begin_script(loading='')

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from configurator import load_config
from plaingpt.monitoring.diagnosis import diagnose, overfit_check
from plaingpt.monitoring.figures import draw_curves, loss_table, tokenizers_differ
from plaingpt.monitoring.film_page import write_page
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.references import read_reference, reference_of
from plaingpt.monitoring.run_record import read_run, run_summary
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import in_use
from plaingpt.system.streams import require_stdout


@dataclass
class PlotConfig:
    output: str = ''  # the picture (default: loss.png in the folder; compare.png here for several)
    reference: str = ''  # of references/: its band is drawn; a run with its settings has it
    live: bool = False  # draw again and again until all runs have ended
    every: Annotated[float, 'at least 1'] = 10.0  # seconds, with live
    film: bool = False  # make a page of what film=True saw in training

    def problems(self):
        ending = '.html' if self.film else '.png'
        if self.film and (self.live or self.reference):
            return ['film=True goes with neither live nor reference']
        if self.output and not self.output.endswith(ending):
            return [f'output={self.output}: must end in {ending}']
        return []


def main(argv):
    folders = [arg for arg in argv if not arg.startswith('-')]
    config = load_config(PlotConfig, [arg for arg in argv if arg not in folders], __doc__)
    require_stdout()
    check_folders(folders)
    if config.film:
        path = Path(folders[0] if len(folders) == 1 else '', 'film.html')
        runs = zip(read_runs(folders), folders, strict=True)
        write_page([(name, folder, rows) for (name, rows, _), folder in runs],
                   config.output or path)
        print(f'{config.output or path}: open it in a browser')
        return
    reference = read_reference(config.reference) if config.reference else None
    default = Path(folders[0], 'loss.png') if len(folders) == 1 else 'compare.png'
    output = Path(config.output or default)
    if config.live:
        print(f'drawing {output} every {config.every:g} seconds until training ends')
        while any(map(in_use, folders)):
            draw_runs(read_runs(folders), output, reference, may_be_empty=True)
            time.sleep(config.every)
    runs = read_runs(folders)
    paths = draw_runs(runs, output, reference)
    for name, rows, run in runs:
        print_run(name, rows, run, reference)
    if len(runs) > 1:
        print_losses(runs)
    for path in paths:
        print(path)


def check_folders(folders):
    """Raises UserError where a folder has no run, and none has just begun there."""
    if not folders:
        raise UserError('name the out_dir of a run: python plot.py out')
    empty = [folder for folder in folders
             if not Path(folder, 'metrics.jsonl').exists() and not in_use(folder)]
    if empty:
        raise UserError('\n'.join(f'{folder}/metrics.jsonl is not there: name the out_dir of a run'
                                  for folder in empty))


def read(folder):
    """→ (rows, facts) of an out_dir."""
    return read_rows(Path(folder, 'metrics.jsonl'), print), read_run(folder)


def read_runs(folders):
    """→ [(name, rows, facts)]"""
    names = [Path(os.path.abspath(folder)).name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    return [(name, *read(folder)) for name, folder in zip(names, folders, strict=True)]


def draw_runs(runs, output, reference, may_be_empty=False):
    """→ paths of the pictures. Raises UserError where there is nothing to draw, unless it
    may_be_empty."""
    if reference and any(run and reference.other_text(run) for _, _, run in runs):
        reference = None
    elif not reference and len(runs) == 1:
        reference = reference_of(runs[0][2])
    try:
        return draw_curves([(name, rows) for name, rows, _ in runs], output, reference,
                           tokenizers_differ(runs))
    except UserError:
        if not may_be_empty:
            raise
    except OSError as e:
        raise UserError(f'{output} cannot be written: {e.strerror}: choose another place with '
                        '--output=FILE.png') from None


def print_run(name, rows, run, reference):
    """Where the run stands, what looks wrong, and where it lies beside the reference."""
    if not rows:
        print(f'{name}: nothing is logged yet')
        return
    print(run_summary(name, rows, run))
    if run:
        for found in diagnose(rows, run):
            print(f'  {found}')
        if verdict := overfit_check(rows, run):
            print(f'  {verdict}')
    else:
        print('  it has no run.json of train.py, and without one nothing is diagnosed')
    if not reference and (recorded := reference_of(run)):
        print(f'  {recorded.compare(name, rows)}')
    elif reference:
        from plaingpt.training.settings import WITHOUT_EFFECT  # which takes torch
        print(f'  {reference.compare(name, rows, run, WITHOUT_EFFECT)}')


def print_losses(runs):
    """A table of what several runs reached, the best first."""
    if texts_differ([run for _, _, run in runs]):
        print('these runs have different texts: which loss is lower says more about the texts than '
              'about the runs')
    differ = tokenizers_differ(runs)
    print('final losses, the best first' + (
        ' by bits/byte: their tokens differ in length, and losses a token do not compare'
        if differ else ''))
    for line in loss_table([(name, rows) for name, rows, _ in runs], differ):
        print(f'  {line}')


def texts_differ(records):
    """Whether runs trained on texts of other lengths, by what their run.json say."""
    sizes = [run['train_tokens'] * (run.get('train_bytes_per_token') or math.nan)
             for run in records if run.get('train_tokens')]
    return any(abs(size / sizes[0] - 1) > 1e-3 for size in sizes)


if __name__ == '__main__':
    run_script(main)
