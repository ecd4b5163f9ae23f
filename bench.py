"""Measure what training takes: time, memory, and what each optimization buys.

    python bench.py config/gpt2_124m.py                 speed of a step, beside a bare matmul
    python bench.py config/gpt2_124m.py --profile       and where its time goes
    python bench.py --ladder                            each optimization by itself
    python bench.py --grid config/shakespeare_char.py   24 trainings, memory, time and loss
    python bench.py --data config/gpt2_124m.py          batches a second, beside the step's need
    python bench.py --memory config/gpt2_124m.py        memory of a step, beside the plan
    python bench.py --checkpoints config/gpt2_124m.py   how long training stands still for a save

Without a config: GPT-2 124M on a GPU, config/bench_cpu.py or config/grid_cpu.py on a CPU.
--memory: on CUDA a real step runs. Elsewhere torch's memory tracker follows a step on tensors
without data, which takes no memory and seconds at any size.
--checkpoints: two real steps, then a save that training waits for and one in the background, in a
folder inside out_dir that is removed again.
"""

import json as json_format
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import load_config
from model import GPTConfig
from plaingpt.benchmarks import grid, ladder
from plaingpt.benchmarks import step_speed as speed
from plaingpt.benchmarks.checkpoint_stalls import measure_checkpoints
from plaingpt.benchmarks.data_rate import measure_data
from plaingpt.benchmarks.memory_check import measure_memory
from plaingpt.benchmarks.result_tables import about, described, make_folder, save, slug
from plaingpt.corpus.corpora import find_dataset_size
from plaingpt.corpus.dataset import dataset_folder, open_dataset
from plaingpt.system.devices import (
    choose_compile,
    choose_device,
    choose_dtype,
    device_name,
    seed_everything,
    use_expandable_segments,
    use_fast_matmul,
)
from plaingpt.system.errors import run_script
from plaingpt.system.hardware import machine_name
from plaingpt.training.memory_planner import out_of_memory_explained, run_of
from plaingpt.training.settings import TrainConfig

LADDER_TOKENS = 2**22  # of the dataset, that the ladder's batches come from


@dataclass
class BenchConfig(TrainConfig):
    # benchmark: what to measure; the speed of a step if nothing else
    ladder: bool = False  # what each optimization buys, one after another
    grid: bool = False  # 24 trainings: what changes cost and gain, alone and together
    data: bool = False  # batches a second from disk and from memory, and what a step needs
    memory: bool = False  # what a step holds after forward, backward and optimizer, and at most
    checkpoints: bool = False  # how long training stands still for a save
    profile: bool = False  # speed: where the time goes, and a trace in out_dir
    # benchmark: how
    steps: int = 10  # that are timed; a figure is their median
    warmup_steps: int = 3  # before them, which do not count
    rounds: int = 3  # ladder: climb so many times; the median is over all
    seeds: int = 3  # grid: of each training
    target_loss: float = 0.0  # grid: time to this validation loss; 0: 5% above the default's last
    real_data: bool = False  # speed: batches from the dataset, not one of random tokens
    json: bool = False  # print JSON: speed, ladder, grid, data
    save: str = ''  # a folder for CSV, table and picture of the same four, such as results

    def out_of_range(self):
        found = super().out_of_range()
        found += [f'{key}={getattr(self, key)}: must be at least 1'
                  for key in ('steps', 'rounds', 'seeds') if getattr(self, key) < 1]
        found += [f'{key}={getattr(self, key)}: must not be negative'
                  for key in ('warmup_steps', 'target_loss', 'vocab_size')
                  if getattr(self, key) < 0]
        return found

    def problems(self):
        found = super().problems()
        if self.batch_size == 'auto':
            found.append('batch_size=auto: a benchmark needs a number')
        if self.world_size() > 1:
            found.append('a benchmark measures one process: start it without torchrun')
        modes = [key for key in ('ladder', 'grid', 'data', 'memory', 'checkpoints', 'profile')
                 if getattr(self, key)]
        if len(modes) > 1:
            found.append(f'one at a time: {", ".join(modes)}')
        return found


# -----------------------------------------------------------------------------
# ladder, grid, data


def measure_ladder(config, dtype, compile, device):
    """→ (rows, their table). The model is GPT-2's: what is newer stays off."""
    folder = dataset_folder(config.dataset)
    vocab_size, known, source = find_dataset_size(config.dataset, config.vocab_size)
    shape = GPTConfig(config.block_size, vocab_size, config.n_layer, config.n_head, config.n_embd,
                      bias=config.bias)
    tokenizer = None
    if any(folder.glob('*.bin')):
        dataset = open_dataset(folder)
        tokenizer = dataset.tokenizer()
        stream = dataset.split('train')
        tokens = stream.sequences(np.array([0]), min(known, LADDER_TOKENS))[0]
    else:
        source += ': random tokens, and no rung of text'
        tokens = np.random.default_rng(config.seed).integers(0, vocab_size, LADDER_TOKENS)
    tokens = tokens.astype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    found = ladder.variants(device, dtype, compile, config.loss_chunk_tokens, tokenizer is not None)
    rows = ladder.measure_variants(shape, found, tokens, tokenizer, batch_size=config.batch_size,
                        steps=config.steps, warmup=config.warmup_steps, rounds=config.rounds,
                        device=device)
    what = f'{config.batch_size} × {config.block_size} tokens a step, {config.n_layer} layers, ' \
           f'{config.n_embd} channels, vocabulary {vocab_size:,}, {source}'
    return rows, f'{what}\n\n{ladder.table(rows)}'


def measure_grid(config, device, name):
    """→ (rows, their tables). With --save=FOLDER a run that is in FOLDER/name.jsonl is not made
    again."""
    vocab_size, _, _ = find_dataset_size(config.dataset)
    journal = Path(config.save, f'{name}.jsonl') if config.save else None
    runs = grid.run_all(config, config.seeds, lambda cell: cell.gpt_config(vocab_size), device,
                        journal, machine_name(device))
    target = config.target_loss or grid.target_of(runs)
    for run in runs:
        run.update(target_loss=target, target_s=grid.seconds_to(target, run['curve']))
    memory_is = 'what tensors on the GPU hold at most' if device.type == 'cuda' \
        else 'what the process holds at most, Python and torch included'
    return runs, grid.tables(runs, target, memory_is)


# -----------------------------------------------------------------------------
# memory and checkpoints


# -----------------------------------------------------------------------------
# all


def read_config(argv):
    """→ (BenchConfig, device). On a CPU a small model takes the place of GPT-2 124M, unless a
    config file is named."""
    config = load_config(BenchConfig, argv, __doc__)
    device, _ = choose_device(config.device)
    named = any(not arg.startswith('-') for arg in argv)
    if device.type == 'cuda' or named or config.memory or config.checkpoints:
        return config, device
    small = Path(__file__).parent / 'config' / ('grid_cpu.py' if config.grid else 'bench_cpu.py')
    return load_config(BenchConfig, [str(small), *argv]), device


def main(argv):
    config, device = read_config(argv)
    dtype, _ = choose_dtype(config.dtype, device, config.n_embd)
    compile, _ = choose_compile(config.compile, device)
    use_fast_matmul()
    use_expandable_segments(device)
    seed_everything(config.seed)
    vocab_size, _, _ = find_dataset_size(config.dataset, config.vocab_size)
    shape = config.gpt_config(vocab_size)
    run = run_of(config, dtype, device.type)
    if config.memory:
        return measure_memory(shape, run, device)
    if config.checkpoints:
        return measure_checkpoints(shape, run, config, device)
    if config.save:
        make_folder(config.save)
    mode = next((key for key in ('ladder', 'grid', 'data') if getattr(config, key)), 'speed')
    name = f'{mode}-{slug(device_name(device))}'
    with out_of_memory_explained(shape, run, device):
        if mode == 'ladder':
            rows, text = measure_ladder(config, dtype, compile, device)
        elif mode == 'grid':
            rows, text = measure_grid(config, device, name)
        elif mode == 'data':
            rows, text = measure_data(config, shape, dtype, compile, device)
        else:
            row, text = speed.measure(config, shape, dtype, compile, device, steps=config.steps,
                                      warmup=config.warmup_steps, real_data=config.real_data,
                                      profile=config.profile)
            rows = [row]
    found = about(device, 'bench.py', argv)
    print(json_format.dumps({**found, 'rows': rows}, indent=1) if config.json
          else described(found, text))
    if config.save:
        path = save(config.save, name, found, rows, text)
        if mode == 'grid':
            grid.draw(rows, f'{path}.png')


if __name__ == '__main__':
    run_script(main)
