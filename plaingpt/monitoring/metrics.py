"""Metrics of a run → the console, metrics.jsonl and the backends of config.log_to.

metrics.jsonl (see run_record.py) is the source of truth. Backends get a copy: a resumed run trims
the file to its checkpoint and sends all rows again.
"""

import math
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.run_record import read_rows
from plaingpt.system.devices import device_name, mfu, peak_memory_bytes, synchronize
from plaingpt.system.distributed import all_reduce_mean, launched_world
from plaingpt.system.errors import phase, print_line
from plaingpt.system.files import append_line
from plaingpt.system.formatting import finite, one_line, short

# What the console shows of a step; metrics.jsonl and loss.png have all numbers that are logged.
COLUMNS = {'loss': 'loss {:.4f}', 'lr': 'lr {:.2e}', 'grad_norm': 'grad {:.2f}'}


class Metrics:
    """Logs numbers about a run: metrics(iter_num, loss=…). Only rank 0 writes.

    model: the GPT; step: the train.Step; clock: of the run; train_data: its BatchLoader
    """

    def __init__(self, config, model, step, clock, train_data):
        world = launched_world()
        self.config, self.step, self.clock, self.train_data = config, step, clock, train_data
        self.path = None if config.is_read_only else Path(config.out_dir, 'metrics.jsonl')
        self.quiet = not world.is_main
        self.backends = []
        self.flops_per_token = model.flops_per_token() / world.size  # on each device
        self.elapsed_before_s = 0.0  # training time before a resume
        self.start_time = time.perf_counter()
        self.wandb_id = None  # of the run in Weights & Biases, which a resumed run continues
        self.rows = []
        self.diagnosed = set()  # names of the diagnoses printed so far
        self.bar = tqdm(disable=True)

    def state_dict(self):
        return {'elapsed_s': self.elapsed_s(), 'wandb_id': self.wandb_id}

    def load_state_dict(self, state):
        self.elapsed_before_s, self.wandb_id = state['elapsed_s'], state['wandb_id']

    def open(self, record, bytes_per_token=None):
        """Open the backends and start counting the time. record: the contents of run.json;
        bytes_per_token: of the evaluated text, or None"""
        self.record, self.bytes_per_token = record, bytes_per_token
        config = self.config
        if self.path and not self.quiet and (config.log_to or config.wandb_log):
            from plaingpt.monitoring.backends import open_backends
            self.backends = open_backends(config, record, self.wandb_id)
            self.wandb_id = next((backend.id for backend in self.backends
                                  if backend.name == 'wandb'), None)
        self.start_time = time.perf_counter()

    def begin(self, iter_num):
        """Start timing steps. Sends the rows of a resumed run to the backends."""
        if not self.quiet and self.path:
            self.rows = read_rows(self.path)
            for row in self.rows:
                self._call_backends('log', row)
            self.diagnosed = set(diagnose(self.rows, self.record))
        config = self.config
        self.bar = tqdm(total=None if config.minutes else config.max_iters, initial=iter_num,
                        desc='compiling' if self.step.compile else 'training', leave=False,
                        dynamic_ncols=True, disable=True if self.quiet else None)
        self.lap_iter = iter_num
        self.lap_start = time.perf_counter()

    def elapsed_s(self):
        """Seconds of training, including those before a resume."""
        return self.elapsed_before_s + time.perf_counter() - self.start_time

    def at(self, iter_num):
        """The keys common to all rows, after `iter_num` updates."""
        return {'iter': iter_num, 'tokens': self.train_data.tokens_before(iter_num),
                'elapsed_s': round(self.elapsed_s(), 3)}

    @contextmanager
    def paused(self, activity):
        """A context whose time is excluded from the step time. The progress bar shows `activity`.
        It first waits for the device, since queued steps do count."""
        synchronize(self.step.device)
        paused_at = time.perf_counter()
        self.bar.set_description(activity)
        with phase(activity):
            yield
        self.bar.set_description('training')
        pause_s = time.perf_counter() - paused_at
        self.lap_start += pause_s
        self.clock.exclude(pause_s)

    def __call__(self, iter_num, **values):
        """Log step number `iter_num`, if it is one of every log_interval. values: of the step, as
        numbers or tensors (averaged over the processes); COLUMNS says which ones are printed."""
        self.bar.update()
        if iter_num % self.config.log_interval:
            return
        tensors = {key: value.detach().float().to(self.step.device)
                   for key, value in values.items() if isinstance(value, torch.Tensor)}
        if tensors:  # reading them waits for the device
            means = all_reduce_mean(torch.stack([*tensors.values()])).tolist()
            values.update(zip(tensors, means, strict=True))
        now = time.perf_counter()
        step_s = (now - self.lap_start) / (iter_num - self.lap_iter)  # since the last logged step
        self.lap_iter = iter_num
        self.lap_start = now
        tokens_per_s = self.config.step_tokens() / step_s
        utilization = mfu(self.flops_per_token * tokens_per_s, device_name(self.step.device),
                          self.step.dtype)
        columns = [template.format(values[key]) for key, template in COLUMNS.items()
                   if key in values]
        columns.append(f'{step_s * 1e3:.0f} ms' if step_s >= 0.1 else f'{step_s * 1e3:.1f} ms')
        columns.append(f'{short(tokens_per_s)} tok/s')
        if self.step.device.type == 'cuda':
            columns.append('mfu n/a' if utilization is None else f'mfu {utilization:.1%}')
        self.bar.set_description(columns[0])
        self._print_columns(iter_num, *columns)
        self.write(iter_num, **values, tokens_per_s=tokens_per_s, mfu=utilization,
                   peak_memory_bytes=peak_memory_bytes(self.step.device))
        self.clock.exclude(time.perf_counter() - now)

    def evaluation(self, iter_num, train_loss, val_loss, val_stderr, best, sample=None, **others):
        """Log an evaluation after `iter_num` updates, and print new diagnoses.
        val_stderr: the standard error of val_loss; others: more numbers for metrics.jsonl"""
        values = {'train_loss': train_loss, 'val_loss': val_loss, 'val_bpb': None}
        columns = [f'train loss {train_loss:.4f}', f'val loss {val_loss:.4f}']
        if val_stderr is not None:
            columns[-1] += f' ± {val_stderr:.4f}'
            values['val_loss_stderr'] = val_stderr
        if self.bytes_per_token:
            values['val_bpb'] = val_loss / math.log(2) / self.bytes_per_token
            columns.append(f'{values["val_bpb"]:.3f} bits/byte')
        if best:
            columns.append('best')
        if sample is not None:
            values['sample'] = sample
        self._print_columns(iter_num, *columns)
        self.write(iter_num, **values, **others)
        self._diagnose()

    def benchmarks(self, iter_num, scores):
        """Log {lm_eval task: {name of a score: number}}."""
        if scores:
            from plaingpt.inference.lm_eval_model import format_scores
            for task, values in scores.items():
                self._print_columns(iter_num, f'{task}: {format_scores(values)}')
                self.write(iter_num, **{f'{task}_{key}': value for key, value in values.items()})

    def print(self, line):
        """Print a line, from rank 0 only."""
        if not self.quiet:
            print_line(line)

    def close(self):
        """Print new diagnoses and close the backends."""
        self.bar.close()
        if self.path:
            self._diagnose()
        self._call_backends('close')

    def _print_columns(self, iter_num, *columns):
        width = len(str(self.config.max_iters))
        self.print(' | '.join([f'iter {iter_num:>{width}}', *columns]))

    def write(self, iter_num, **values):
        """Append a row with these values, after `iter_num` updates."""
        if self.quiet:
            return
        row = self.at(iter_num)
        for key, value in values.items():
            row[key] = value if isinstance(value, str) else finite(value)
        self.rows.append(row)
        if self.path:
            append_line(self.path, row)
            self._call_backends('log', row)

    def _call_backends(self, method, *args):
        for backend in list(self.backends):
            try:
                getattr(backend, method)(*args)
            except Exception as e:  # a backend may raise anything, and must not stop the run
                self.backends.remove(backend)
                self.print(f'warning: {backend.name} failed ({one_line(e)}): logging continues '
                           f'without it; {self.path} has all metrics')

    def _diagnose(self):
        if self.quiet:
            return
        for name, text in diagnose(self.rows, self.record).items():
            if name not in self.diagnosed:
                self.diagnosed.add(name)
                self.print(f'diagnosis: {text}')
