"""Draw the curves of runs, say what looks wrong, compare with a reference; show a film.

    python plot.py out
    python plot.py out-a out-b --output=both.png
    python plot.py --film out
"""

from dataclasses import dataclass
from pathlib import Path

from configurator import load_config
from plaingpt.monitoring.curves import draw_runs
from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.film_page import write_page
from plaingpt.monitoring.references import compare, read_band
from plaingpt.monitoring.run_record import read_rows, read_run, run_summary
from plaingpt.system.errors import UserError, run_script


@dataclass
class PlotConfig:
    output: str = ''  # the picture (default: loss.png in the folder; compare.png here for several)
    film: bool = False  # make a page of what film=True saw in training

    def problems(self):
        ending = '.html' if self.film else '.png'
        return [f'output={self.output}: must end in {ending}'] \
            if self.output and not self.output.endswith(ending) else []


def main(argv):
    folders = [arg for arg in argv if not arg.startswith('-')]
    config = load_config(PlotConfig, [arg for arg in argv if arg not in folders], __doc__)
    runs = read_runs(folders)
    default = Path(folders[0], 'loss.png') if len(folders) == 1 else Path('compare.png')
    if config.film:
        path = Path(config.output or Path(folders[0], 'film.html'))
        write_page(runs[0][0], folders[0], path)
        print(f'{path}: open it in a browser')
        return
    path = Path(config.output or default)
    # Where tokenizers differ, losses a token do not compare.
    by_bits = len({run.get('val_bytes_per_token') for *_, run in runs} - {None}) > 1
    draw_runs([(name, rows) for name, rows, _ in runs], path, read_band(runs[0][2]), by_bits)
    for name, rows, run in runs:
        describe(name, rows, run)
    print(path)


def read_runs(folders):
    """→ [(name, rows, facts)]. Raises UserError where a folder has no run."""
    for folder in folders or ['nothing']:
        if not Path(folder, 'metrics.jsonl').exists():
            raise UserError(f'{folder} has no metrics.jsonl: name the out_dir of a run: python '
                            'plot.py out')
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    return [(name, read_rows(Path(folder, 'metrics.jsonl')), read_run(folder))
            for name, folder in zip(names, folders, strict=True)]


def describe(name, rows, run):
    """Print where the run stands, what looks wrong, and where it lies beside its reference."""
    if not rows:
        print(f'{name}: nothing is logged yet')
        return
    print(run_summary(name, rows, run))
    if not run:
        print('  it has no run.json of train.py, and without one nothing is diagnosed')
        return
    for found in diagnose(rows, run).values():
        print(f'  {found}')
    print(f'  {name} {compare(rows, run)}')


if __name__ == '__main__':
    run_script(main)
