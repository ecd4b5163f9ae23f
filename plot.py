"""Draw the curves of runs, say what looks wrong, and compare with a reference.

    python plot.py out
    python plot.py out-a out-b --output=both.png
    python plot.py out --reference=shakespeare_char_cpu
    python plot.py out --live
"""

import time
from dataclasses import dataclass
from pathlib import Path

from configurator import load_config
from plaingpt.monitoring.diagnosis import diagnose, overfit_check
from plaingpt.monitoring.figures import draw
from plaingpt.monitoring.metrics import read_rows
from plaingpt.monitoring.references import read_reference
from plaingpt.monitoring.run_summary import read_run
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.folder_lock import in_use
from plaingpt.system.formatting import duration


@dataclass
class PlotConfig:
    output: str = ''  # the picture (default: loss.png in the folder; compare.png here for several)
    reference: str = ''  # a file of references/: draw its band, and say where the runs lie
    live: bool = False  # draw anew until no run goes on any more
    every: float = 10.0  # seconds, with live

    def problems(self):
        found = [] if self.every >= 1 else [f'every={self.every}: must be at least 1']
        if self.output and not self.output.endswith('.png'):
            found.append(f'output={self.output}: must end in .png')
        return found


def read(folder):
    """→ (rows, run) of an out_dir."""
    path = Path(folder, 'metrics.jsonl')
    return read_rows(path, print) if path.exists() else [], read_run(folder)


def check(folders):
    """Raises UserError where there is no run, and none has just begun."""
    empty = [folder for folder in folders
             if not Path(folder, 'metrics.jsonl').exists() and not in_use(folder)]
    if empty:
        raise UserError('\n'.join(f'{folder}/metrics.jsonl is not there: name the out_dir of a run'
                                  for folder in empty))


def is_over(rows, run):
    return bool(rows) and rows[-1]['iter'] >= run.get('config', {}).get('max_iters', 0)


def comparable(reference, found):
    return reference and not any(run and reference.other_text(run) for _, run in found)


def summary(name, rows, run):
    """'out: iteration 2000, 1,536,000 tokens, 1m44s; validation 1.8997 at best, at iteration 2000;
    all iterations are done'."""
    line = f'{name}: iteration {rows[-1]["iter"]}, {rows[-1]["tokens"]:,} tokens, ' \
           f'{duration(rows[-1]["elapsed_s"])}'
    evaluations = [row for row in rows if row.get('val_loss') is not None]
    if evaluations:
        best = min(evaluations, key=lambda row: row['val_loss'])
        line += f'; validation {best["val_loss"]:.4f} at best, at iteration {best["iter"]}'
    return f'{line}; {run["ending"]}' if run.get('ending') else line


def main(argv):
    folders = [arg for arg in argv if not arg.startswith('-')]
    config = load_config(PlotConfig, [arg for arg in argv if arg not in folders], __doc__)
    if not folders:
        raise UserError('name the out_dir of a run: python plot.py out')
    reference = read_reference(config.reference) if config.reference else None
    output = Path(config.output or (Path(folders[0], 'loss.png') if len(folders) == 1
                                    else 'compare.png'))
    names = [Path(folder).resolve().name if folders.count(folder) == 1 else folder
             for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    check(folders)
    if config.live:
        print(f'drawing {output} every {config.every:g} seconds until training ends')
    while True:
        busy = [in_use(folder) for folder in folders]  # asked first, or the last rows may be missed
        found = [read(folder) for folder in folders]
        live = config.live and any(not is_over(*each) if training is None else training
                                   for training, each in zip(busy, found, strict=True))
        try:
            draw([(name, rows) for name, (rows, _) in zip(names, found, strict=True)], output,
                 reference if comparable(reference, found) else None)
        except UserError:
            if not live:
                raise
        except OSError as e:
            raise UserError(f'{output} cannot be written: {e.strerror}: choose another place with '
                            '--output=FILE.png') from None
        if not live:
            break
        time.sleep(config.every)
    for name, (rows, run) in zip(names, found, strict=True):
        if not rows:
            print(f'{name}: nothing is logged yet')
            continue
        print(summary(name, rows, run))
        if run:
            for each in diagnose(rows, run, is_over(rows, run)):
                print(f'  {each}')
            if verdict := overfit_check(rows, run):
                print(f'  {verdict}')
        else:
            print('  it has no run.json of train.py, and without one nothing is diagnosed')
        if reference:
            print(f'  {reference.compare(name, rows, run)}')
    print(output)


if __name__ == '__main__':
    run_script(main)
