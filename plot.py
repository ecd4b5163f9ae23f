"""Draw the curves of runs, diagnose them, compare them with a reference; show the film of a run.

    python plot.py out
    python plot.py out-a out-b --output=both.png
    python plot.py --film out
"""

import html
import json
from dataclasses import dataclass
from pathlib import Path

from configurator import load_config
from plaingpt.monitoring.run_record import read_rows, read_run
from plaingpt.monitoring.run_report import describe, draw_runs
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, write_atomically
from plaingpt.system.formatting import command_for


@dataclass
class PlotConfig:
    output: str = ''  # file to write; default: loss.png in the run's folder, or compare.png
    film: bool = False  # make an HTML page of a run trained with --film

    def conflicts(self):
        suffix = '.html' if self.film else '.png'
        if self.output and not self.output.endswith(suffix):
            return [f'output={self.output}: must end in {suffix}']
        return []


def main(argv):
    folders = [arg for arg in argv if not arg.startswith('-')]
    config = load_config(PlotConfig, [arg for arg in argv if arg not in folders], __doc__)
    if config.film and len(folders) > 1:
        raise UserError(f'{" and ".join(folders)}: --film takes one run; pass one of them')
    runs = read_runs(folders, 'film.jsonl' if config.film else 'metrics.jsonl')
    if config.film:
        path = Path(config.output or Path(folders[0], 'film.html'))
        draw_film(*runs[0][:2], path)
        print(f'wrote {path}: open it in a browser')
        return
    default = Path(folders[0], 'loss.png') if len(folders) == 1 else Path('compare.png')
    path = Path(config.output or default)
    note = draw_runs(runs, path)
    for name, rows, run in runs:
        if rows:
            print('\n  '.join(describe(name, rows, run)))
    if note:
        print(note)
    print(f'wrote {path}')


def read_runs(folders, log):
    """→ [(name, rows of this log, run.json)]. Raises UserError if a folder has no run."""
    if not folders:
        raise UserError('pass the out_dir of a run, or of several to compare: '
                        f'{command_for("plot")} out')
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    runs = [(name, read_rows(Path(folder, log)), read_run(folder))
            for name, folder in zip(names, folders, strict=True)]
    for folder, (*_, run) in zip(folders, runs, strict=True):
        if not run:
            raise UserError(f'{folder} has no run.json: pass the out_dir of a run')
    return runs


def draw_film(name, snapshots, path):
    """Write a self-contained HTML page from the rows of film.jsonl. Raises UserError if there are
    none."""
    if not snapshots:
        raise UserError(f'{name} has no film: train with --film=True')
    page = (ROOT / 'plaingpt/monitoring/film.html').read_text(encoding='utf-8')
    data = json.dumps(snapshots).replace('<', r'\u003c')  # a sample may contain </script>
    page = page.replace('NAME', html.escape(name)).replace('>DATA<', f'>{data}<')
    write_atomically(path, page)


if __name__ == '__main__':
    run_script(main)
