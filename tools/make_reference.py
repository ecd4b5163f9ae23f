"""Make references/NAME.jsonl: train config/NAME.py with several seeds and keep what they logged.

    python tools/make_reference.py shakespeare_char_cpu
    python tools/make_reference.py quickstart --seeds=10,11
    python tools/make_reference.py quickstart --seeds=101,102,103 --fresh

Seeds that the file has already stay, so that they can be made one at a time; --again forgets them.
With --fresh the seeds are not added: each is compared with those of the file. About one in 20 lies
outside of their band.
"""

import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import load_config
from plaingpt.monitoring import references
from plaingpt.monitoring.metrics_file import read_rows
from plaingpt.monitoring.run_record import changed_settings, read_run
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT
from plaingpt.training.settings import TrainConfig, settings_without_effect


@dataclass
class ReferenceConfig:
    seeds: str = '1337,1,2,3,4,5,6,7,8,9'  # with commas between; 1337 is the default of train.py
    again: bool = False  # forget what the file has
    fresh: bool = False  # compare the seeds with what the file has, and do not add them

    def problems(self):
        good = all(seed.isdecimal() for seed in self.seeds.split(','))
        found = [] if good else [f'seeds={self.seeds}: whole numbers with commas between']
        if self.again and self.fresh:
            found.append('again and fresh exclude each other')
        return found


def train(name, seed):
    """Run config/NAME.py with a seed → (facts, rows)."""
    with tempfile.TemporaryDirectory() as folder:
        out_dir = Path(folder, name)
        done = subprocess.run([sys.executable, ROOT / 'train.py', ROOT / 'config' / f'{name}.py',
                               f'--seed={seed}', f'--out_dir={out_dir}', '--report=False',
                               '--sample_tokens=0'])
        if done.returncode:
            sys.exit(done.returncode)  # train.py has printed why
        run, rows = read_run(out_dir), read_rows(out_dir / 'metrics.jsonl', print)
    run['config']['out_dir'] = run['changed']['out_dir'] = f'out-{name}'
    run['command'] = f'train.py config/{name}.py --seed={seed}'
    source = run['data'].get('source', {})
    if 'input' in source:  # without its folder on this machine
        source['input'] = Path(source['input']).name
    return run, rows


def find_reference(name, path):
    """The reference as it is, or an empty one. Raises UserError where its config has changed."""
    if not (references.FOLDER / f'{name}.jsonl').exists():
        return references.Reference(name, {}, {})
    reference = references.read_reference(name)
    config = load_config(TrainConfig, [str(path)])
    now = {'config': asdict(config), 'changed': changed_settings(config)}
    if differing := [key for key, *_ in references.differing_settings(
            now, reference.run, settings_without_effect())]:
        raise UserError(f'{references.FOLDER / name}.jsonl was made with another '
                        f'{", ".join(differing)} than config/{name}.py has: --again makes all '
                        'seeds anew')
    return reference


def compare_fresh(name, seeds):
    """Say where new seeds lie beside the reference, and how many of them are outside its band."""
    reference, inside = references.read_reference(name), []
    for seed in seeds:
        run, rows = train(name, seed)
        inside.append(reference.holds(rows))
        print(reference.compare(f'seed {seed}', rows, run, settings_without_effect()), flush=True)
    print(f'{inside.count(False)} of {len(inside)} seeds end outside of the band')


def main(argv):
    names = [arg for arg in argv if not arg.startswith('-')]
    config = load_config(ReferenceConfig, [arg for arg in argv if arg not in names], __doc__)
    if len(names) != 1:
        raise UserError('name one config: python tools/make_reference.py shakespeare_char_cpu')
    name = Path(names[0]).stem  # config/NAME.py will do too
    path = ROOT / 'config' / f'{name}.py'
    if not path.exists():
        raise UserError(f'config/{name}.py is not there: name one of config/, without .py')
    reference = references.Reference(name, {}, {}) if config.again else find_reference(name, path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the training ends too
    if config.fresh:
        compare_fresh(name, map(int, config.seeds.split(',')))
        return
    for seed in map(int, config.seeds.split(',')):
        if seed in reference.runs:
            print(f'seed {seed} is there already')
            continue
        reference.runs[seed], reference.rows[seed] = train(name, seed)
        if not config.again:
            references.write_reference(reference)
    references.write_reference(reference)  # with --again the old file stays until all are there
    print(f'{references.FOLDER / name}.jsonl: seeds {", ".join(map(str, sorted(reference.runs)))}')


if __name__ == '__main__':
    run_script(main)
