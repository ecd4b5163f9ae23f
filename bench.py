"""Measure what training takes: time, memory, and what each optimization buys.

    python bench.py config/gpt2_124m.py                 speed of a step, beside a bare matmul
    python bench.py config/gpt2_124m.py --profile       and where its time goes
    python bench.py --ladder                            what each optimization adds
    python bench.py --grid config/shakespeare_char.py   24 trainings, memory, time and loss
    python bench.py --ablate config/quickstart.py --set conv=0,4 --set head_lr_scale=1,2
                                                        what settings gain together, over seeds
    python bench.py --ablate config/quickstart.py --set conv=4,0 --set mlp=swiglu,relu2 --one_by_one
                                                        what each of them gains
    python bench.py --data config/gpt2_124m.py          batches a second, beside the step's need
    python bench.py --memory config/gpt2_124m.py        memory of a step, beside the plan
    python bench.py --checkpoints config/gpt2_124m.py   how long a save stops training
    python bench.py --resuming config/quickstart.py     how far a resumed run ends from a whole one

Without a config: GPT-2 124M on a GPU, config/bench_cpu.py or config/grid_cpu.py on a CPU.
--memory runs a real step on CUDA; elsewhere torch's memory tracker follows a step on tensors
without data, which takes no memory, and about a second for each layer (a minute for 48).
--checkpoints saves into a folder inside out_dir that is removed again.
"""

if __name__ == '__main__':  # before torch, which takes seconds
    from plaingpt.system.errors import begin_script
    begin_script()

import json
from dataclasses import dataclass
from itertools import product
from typing import Annotated

from configurator import load_config
from plaingpt.benchmarks import result_tables
from plaingpt.benchmarks.ablation import draw_ablation, measure_ablation
from plaingpt.benchmarks.data_rate import measure_data
from plaingpt.benchmarks.grid import draw_grid, measure_grid
from plaingpt.benchmarks.ladder import measure_ladder
from plaingpt.benchmarks.memory_check import measure_memory
from plaingpt.benchmarks.saving import measure_checkpoints, measure_resuming
from plaingpt.benchmarks.step_speed import Workload, measure_speed
from plaingpt.data.corpora import find_dataset_size
from plaingpt.system import devices
from plaingpt.system.errors import UserError, run_script
from plaingpt.system.files import ROOT, make_writable
from plaingpt.system.streams import require_stdout, warn
from plaingpt.training.memory_planner import explain_out_of_memory
from plaingpt.training.settings import TrainConfig


@dataclass
class BenchConfig(TrainConfig):
    # benchmark: what to measure; the speed of a step if nothing else
    ladder: bool = False  # what each optimization buys, one after another
    grid: bool = False  # 24 trainings: what changes cost and gain, alone and together
    ablate: bool = False  # a training for each combination of what --set names
    data: bool = False  # batches a second from disk and from memory, and what a step needs
    memory: bool = False  # what a step holds after forward, backward and optimizer, and at most
    checkpoints: bool = False  # how long a save stops training
    resuming: bool = False  # weights of a resumed run, beside those of two whole ones
    profile: bool = False  # speed: where the time goes, and a trace in out_dir
    # benchmark: how
    steps: Annotated[int, 'at least 1'] = 10  # that are timed; a figure is their median
    warmup_steps: Annotated[int, 'at least 0'] = 3  # before them, which do not count
    rounds: Annotated[int, 'at least 1'] = 3  # ladder: measure all so many times, for a median
    seeds: Annotated[int, 'at least 1'] = 3  # grid, ablate: of each training
    set: str = ''  # ablate: a setting and its values, as conv=0,4; again for another setting
    one_by_one: bool = False  # ablate: the base and each change alone, not all combinations
    target_loss: Annotated[float, 'at least 0'] = 0.0  # grid: time to it; 0: 5% above the default's
    real_data: bool = False  # speed: batches from the dataset, not one of random tokens
    json: bool = False  # print JSON
    save: str = ''  # a folder for CSV, table and picture of the same, such as results

    def problems(self):
        found = super().problems()
        if self.batch_size == 'auto':
            found.append('batch_size=auto: a benchmark needs a number')
        if self.world_size() > 1:
            found.append('a benchmark measures one process: start it without torchrun')
        chosen = [key for key in (*BENCHMARKS, 'profile') if getattr(self, key, False)]
        if len(chosen) > 1:
            found.append(f'one at a time: {", ".join(chosen)}')
        if (self.set or self.one_by_one) and not self.ablate:
            found.append('set and one_by_one are for --ablate')
        return found


# Each: a Workload → (rows of numbers, their Markdown). A new one also is a flag of BenchConfig.
BENCHMARKS = {'speed': measure_speed, 'ladder': measure_ladder, 'grid': measure_grid,
              'ablate': measure_ablation, 'data': measure_data,
              'checkpoints': measure_checkpoints, 'memory': measure_memory,
              'resuming': measure_resuming}
PICTURES = {'grid': draw_grid, 'ablate': draw_ablation}


def one_set(argv):
    """Every '--set', 'conv=0,4' as one '--set=conv=0,4 head_lr_scale=1,2', at the end."""
    rest, sets, words = [], [], iter(argv)
    for word in words:
        if word == '--set':
            sets.append(next(words, ''))
        elif word.startswith('--set='):
            sets.append(word.removeprefix('--set='))
        else:
            rest.append(word)
    return [*rest, '--set=' + ' '.join(sets)] if sets else rest


def read_config(argv):
    """→ (BenchConfig, device, the words it was read from). Without a config file a CPU gets a
    smaller model than GPT-2."""
    config = load_config(BenchConfig, argv, __doc__)
    device, _ = devices.choose_device(config.device)
    named = any(not arg.startswith('-') for arg in argv)
    if device.type == 'cuda' or named or config.memory or config.checkpoints:
        return config, device, argv
    trains = config.grid or config.ablate or config.resuming
    small = 'grid_cpu.py' if trains else 'bench_cpu.py'
    argv = [str(ROOT / 'config' / small), *argv]
    return load_config(BenchConfig, argv), device, argv


def read_variants(config, words):
    """--set='conv=0,4 head_lr_scale=1,2' → {'conv=0, head_lr_scale=1': its BenchConfig, …}, each
    read as if it was written on the command line. Raises UserError."""
    choices = {}
    for choice in config.set.split():
        key, _, values = choice.partition('=')
        values = values.split(',')
        if len(set(values)) < max(2, len(values)) or key in choices:
            raise UserError(f'--set {choice}: give a setting, once, and two values or more, the '
                            'first of them for the base, as --set conv=0,4')
        choices[key] = [f'{key}={value}' for value in values]
    if not choices:
        raise UserError('--ablate: say what to change, as --set conv=0,4')
    if config.one_by_one:
        base = [first for first, *_ in choices.values()]
        chosen = {'base': base, **{other: [*base, other] for _, *rest in choices.values()
                                  for other in rest}}
    else:
        chosen = {', '.join(options): options for options in product(*choices.values())}
    return {name: load_config(BenchConfig, [*words, *(f'--{option}' for option in options)])
            for name, options in chosen.items()}


def prepare_work(config, device, words):
    """→ Workload, with torch set up as in training."""
    devices.use_fast_matmul()
    devices.use_expandable_segments(device)
    devices.seed_everything(config.seed, deterministic=config.deterministic)
    dtype, _ = devices.choose_dtype(config.dtype, device, config.n_embd)
    compile, _ = devices.choose_compile(config.compile, device)
    vocab_size, _, _ = find_dataset_size(config.dataset, config.vocab_size)
    return Workload(config, config.gpt_config(vocab_size), device, dtype, compile,
                    read_variants(config, words) if config.ablate else None)


def main(argv):
    config, device, words = read_config(one_set(argv))
    if config.save:
        make_writable(config.save, 'save')  # before hours of measuring
    else:
        require_stdout()
    work = prepare_work(config, device, words)
    name = next((key for key in BENCHMARKS if getattr(config, key, False)), 'speed')
    with explain_out_of_memory(work.shape, config, work.dtype, device):
        rows, text = BENCHMARKS[name](work)
    facts = result_tables.describe_measurement(device, argv)
    print(json.dumps({**facts, 'rows': rows, 'table': text}, indent=1) if config.json
          else result_tables.format_page(facts, text))
    if config.save:
        path = result_tables.result_path(config.save, name, device)
        result_tables.save(path, facts, rows, text)
        if name in PICTURES:
            try:
                PICTURES[name](rows, f'{path}.png')
            except UserError as problem:  # the figures are saved without matplotlib too
                warn(problem)


if __name__ == '__main__':
    run_script(main)
