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

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from configurator import load_config
from plaingpt.monitoring.curves import draw_runs, loss_table, tokenizers_differ
from plaingpt.monitoring.diagnosis import diagnose, overfit_check
from plaingpt.monitoring.film_page import write_page
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.references import compare, read_reference, recipe_of, recorded
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
    default = Path(folders[0], 'loss.png') if len(folders) == 1 else Path('compare.png')
    if config.film:
        path = config.output or default.with_name('film.html')
        write_page([(name, folder, rows) for folder, (name, rows, _)
                    in zip(folders, read_runs(folders), strict=True)], path)
        print(f'{path}: open it in a browser')
        return
    output = Path(config.output or default)
    if config.live:
        print(f'drawing {output} every {config.every:g} seconds until training ends')
        while any(map(in_use, folders)):
            with suppress(UserError):  # nothing is logged yet
                draw(read_runs(folders), output, config.reference)
            time.sleep(config.every)
    runs = read_runs(folders)
    draw(runs, output, config.reference)
    for name, rows, run in runs:
        describe(name, rows, run, config.reference)
    if len(runs) > 1:
        by_bits = tokenizers_differ(runs)
        print('final losses, the best first' + by_bits * ' by bits/byte: their tokens differ in '
              'length, and losses a token do not compare')
        for line in loss_table([(name, rows) for name, rows, _ in runs], by_bits):
            print(f'  {line}')
    print(output)


def check_folders(folders):
    """Raises UserError where a folder has no run, and none has just begun there."""
    empty = [folder for folder in folders
             if not Path(folder, 'metrics.jsonl').exists() and not in_use(folder)]
    if empty or not folders:
        raise UserError(f'{", ".join(empty) or "nothing"} has no metrics.jsonl: name the out_dir '
                        'of a run: python plot.py out')


def read_runs(folders):
    """→ [(name, rows, facts)]"""
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    return [(name, read_rows(Path(folder, 'metrics.jsonl'), print), read_run(folder))
            for name, folder in zip(names, folders, strict=True)]


def draw(runs, output, reference):
    reference = read_reference(reference) if reference else recorded(runs[0][2])
    try:
        draw_runs([(name, rows) for name, rows, _ in runs], output,
                  reference if len(runs) == 1 else None, tokenizers_differ(runs))
    except OSError as e:
        raise UserError(f'{output} cannot be written: {e.strerror}: choose another place with '
                        '--output=FILE.png') from None


def describe(name, rows, run, reference):
    """Print where the run stands, what looks wrong, and where it lies beside its reference."""
    if not rows:
        print(f'{name}: nothing is logged yet')
        return
    print(run_summary(name, rows, run))
    if not run:
        print('  it has no run.json of train.py, and without one nothing is diagnosed')
        return
    for found in [*diagnose(rows, run), overfit_check(rows, run)]:
        if found:
            print(f'  {found}')
    where = compare(rows, run)
    if reference:
        from plaingpt.training.settings import settings_without_effect  # which takes torch
        where = read_reference(reference).compare(rows, recipe_of(run, settings_without_effect()))
    print(f'  {name} {where}')


if __name__ == '__main__':
    run_script(main)
