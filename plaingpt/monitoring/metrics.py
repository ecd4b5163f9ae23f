"""Metrics of a run → the console, metrics.jsonl and the backends of config.log_to.

metrics.jsonl (see run_record.py) is the source of truth. Backends get a copy: a resumed run trims
the file to its checkpoint and sends all rows again.
"""

import math
import time
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from plaingpt.monitoring.diagnosis import diagnose
from plaingpt.monitoring.run_record import finite, read_rows
from plaingpt.system.devices import device_name, mfu, peak_memory_bytes, synchronize
from plaingpt.system.errors import phase, print_line
from plaingpt.system.files import append_line
from plaingpt.system.formatting import one_line, short


class Metrics:
    """Logs the metrics of a train.Run and keeps its clock. Only rank 0 writes.

    record: the contents of run.json; backends: from open_backends
    bytes_per_token: of the evaluated text, or None; elapsed_s: training time before a resume
    """

    def __init__(self, run, record, backends=(), bytes_per_token=None, elapsed_s=0.0):
        self.run = run
        self.record = record
        self.device = run.device
        self.path = None if run.config.is_read_only else Path(run.config.out_dir, 'metrics.jsonl')
        self.quiet = not run.world.is_main
        self.backends = list(backends)
        self.bytes_per_token = bytes_per_token
        self.flops_per_token = run.model.flops_per_token() / run.world.size  # on each device
        self.start_time = time.perf_counter() - elapsed_s
        self.rows = []
        self.diagnosed = set()  # names of the diagnoses printed so far
        self.bar = tqdm(disable=True)

    def begin(self, iter_num):
        """Start timing steps. Sends the rows of a resumed run to the backends."""
        if not self.quiet and self.path:
            self.rows = read_rows(self.path)
            for row in self.rows:
                self._send(row)
            self.diagnosed = set(diagnose(self.rows, self.record))
        config = self.run.config
        self.bar = tqdm(total=None if config.minutes else config.max_iters, initial=iter_num,
                        desc='compiling' if self.record['compile'] else 'training', leave=False,
                        dynamic_ncols=True, disable=True if self.quiet else None)
        self.lap_iter = iter_num
        self.lap_start = time.perf_counter()

    def elapsed_s(self):
        """Seconds of training, including those before a resume."""
        return time.perf_counter() - self.start_time

    def at(self, iter_num):
        """The keys common to all rows, after `iter_num` updates."""
        return {'iter': iter_num, 'tokens': self.run.train_data.tokens_before(iter_num),
                'elapsed_s': round(self.elapsed_s(), 3)}

    @contextmanager
    def paused(self, activity):
        """A context whose time is excluded from the step time. The progress bar shows `activity`.
        It first waits for the device, since queued steps do count."""
        synchronize(self.device)
        paused_at = time.perf_counter()
        self.bar.set_description(activity)
        with phase(activity):
            yield
        self.bar.set_description('training')
        pause_s = time.perf_counter() - paused_at
        self.lap_start += pause_s
        self.run.clock.exclude(pause_s)

    def step(self, iter_num, loss, lr, grad_norm):
        """Log update number `iter_num`. loss and grad_norm may be tensors. Reading them waits for
        the device, so call this only for logged steps."""
        loss, grad_norm = float(loss), float(grad_norm)
        now = time.perf_counter()
        step_s = (now - self.lap_start) / (iter_num - self.lap_iter)  # since the last logged step
        self.lap_iter = iter_num
        self.lap_start = now
        tokens_per_s = self.run.config.step_tokens() / step_s
        utilization = mfu(self.flops_per_token * tokens_per_s, device_name(self.device),
                          self.run.dtype)
        step_ms = f'{step_s * 1e3:.0f}' if step_s >= 0.1 else f'{step_s * 1e3:.1f}'
        columns = [f'loss {loss:.4f}', f'lr {lr:.2e}', f'grad {grad_norm:.2f}', f'{step_ms} ms',
                   f'{short(tokens_per_s)} tok/s']
        if self.device.type == 'cuda':
            columns.append('mfu n/a' if utilization is None else f'mfu {utilization:.1%}')
        self.bar.set_description(f'loss {loss:.4f}')
        self._print_columns(iter_num, *columns)
        self.write(iter_num, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=tokens_per_s,
                   mfu=utilization, peak_memory_bytes=peak_memory_bytes(self.device))
        self.run.clock.exclude(time.perf_counter() - now)

    def evaluation(self, iter_num, train_loss, val_loss, val_stderr, best, sample=None):
        """Log an evaluation after `iter_num` updates, and print new diagnoses.
        val_stderr: the standard error of val_loss"""
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
        self.write(iter_num, **values)
        self._diagnose()

    def benchmark(self, iter_num, name, scores, formatted):
        """Log the scores of a benchmark, {name: number}. formatted: the scores as text"""
        self._print_columns(iter_num, f'{name}: {formatted}')
        self.write(iter_num, **{f'{name}_{key}': value for key, value in scores.items()})

    def print(self, line):
        """Print a line, from rank 0 only."""
        if not self.quiet:
            print_line(line)

    def wandb_id(self):
        """The id of the wandb run, which a resumed run continues, or None."""
        return next((backend.id for backend in self.backends if backend.name == 'wandb'), None)

    def close(self):
        """Print new diagnoses and close the backends."""
        self.bar.close()
        if self.path:
            self._diagnose()
        for backend in list(self.backends):
            self._call(backend, backend.close)

    def _print_columns(self, iter_num, *columns):
        width = len(str(self.run.config.max_iters))
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
            self._send(row)

    def _send(self, row):
        for backend in list(self.backends):
            self._call(backend, backend.log, row)

    def _call(self, backend, method, *args):
        try:
            method(*args)
        except Exception as e:  # a backend may raise anything, and must not stop the run
            self.backends.remove(backend)
            self.print(f'warning: {backend.name} failed ({one_line(e)}): logging continues without '
                       f'it; {self.path} has all metrics')

    def _diagnose(self):
        if self.quiet:
            return
        for name, text in diagnose(self.rows, self.record).items():
            if name not in self.diagnosed:
                self.diagnosed.add(name)
                self.print(f'diagnosis: {text}')
