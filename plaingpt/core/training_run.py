"""A training run: the objects that train.py's loop works with, and saving and resuming them."""

from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from model import GPT
from plaingpt.core.batches import BatchLoader
from plaingpt.core.checkpoint import Saver
from plaingpt.core.dataset import Dataset
from plaingpt.core.optimizers import ema_weights
from plaingpt.core.progress import FINISHED, TIME_UP, IterationClock, Progress
from plaingpt.core.settings import TrainConfig
from plaingpt.core.start import StartingPoint
from plaingpt.system.devices import RandomState
from plaingpt.system.distributed import StopRequest, launched_world
from plaingpt.system.files import refuse_unknown
from plaingpt.system.formatting import command_for, count_of, quoted


@dataclass
class Run:
    config: TrainConfig
    start: StartingPoint  # scratch, pretrained weights, or the checkpoint to resume
    dataset: Dataset  # or a Mixture
    train_data: BatchLoader  # or a MixedLoader
    val_data: BatchLoader
    model: GPT  # what checkpoints save; step.model is the same model, compiled and in DDP
    step: object  # train.Step
    clock: IterationClock
    progress: Progress
    log: object  # monitoring.metrics.Metrics
    saver: Saver
    stop: StopRequest

    @property
    def is_new(self):
        """Whether the weights are still the initial ones."""
        return self.start.from_scratch and self.progress.iter_num == 0

    def parts(self):
        """The objects whose state a checkpoint holds, besides the model and the optimizer. Each has
        state_dict() → {key: JSON}, with keys that no other has, and load_state_dict(state), where
        `state` has the keys of all. A key that older checkpoints lack needs state.get()."""
        return (self.progress, self.step, self.clock, self.log,
                RandomState(self.step.device, launched_world().rank))

    def saved_state(self):
        """The JSON of a checkpoint: the settings, the tokenizer, a fingerprint of the tokens and
        the id that starts each document, the number of sequences that all processes have read, and
        the state of the parts."""
        state = {'config': asdict(self.config), **self.dataset.state(),
                 'document_start': self.dataset.document_start,
                 'sequences': self.train_data.sequences_before(self.progress.iter_num)}
        for part in self.parts():
            state.update(part.state_dict())
        return state

    def resume(self, checkpoint):
        """Restore everything except the weights, which train.build() has loaded. Raises UserError
        if a newer version has saved what this one does not know."""
        known = {'format_version', 'model', 'model_code', 'chunks', *self.saved_state()}
        refuse_unknown(checkpoint.path, checkpoint.state.keys() - known)
        checkpoint.load_optimizer(self.step.optimizer, self.model)
        for part in self.parts():
            part.load_state_dict(checkpoint.state)
        self.train_data.resume_at(checkpoint.iter_num, checkpoint.state['sequences'])
        # Evaluations read as many sequences as before, even if batch_size has changed.
        if checkpoint.settings()['eval_iters'] != self.config.eval_iters:
            self.progress.eval_sequences = self.config.eval_sequences()
        if self.config.eval_only:
            self.progress.evaluated_at = None  # evaluate again

    def save(self):
        """Save a checkpoint of this iteration, unless it exists or nothing has been trained yet."""
        progress = self.progress
        is_saved = progress.saved_at == progress.iter_num \
            and (progress.saved_evaluated or not progress.evaluated)
        if progress.iter_num == 0 or is_saved or self.config.eval_only:
            return
        with self.log.paused('save'), ema_weights(self.step.optimizer):
            self.saver.save(self.model, self.step.optimizer, self.saved_state())
        progress.saved_at = progress.iter_num
        progress.saved_evaluated = progress.evaluated

    def save_is_due(self):
        config, progress = self.config, self.progress
        is_best = progress.evals_since_best == 0
        if progress.evaluated and (config.always_save_checkpoint or is_best):
            return True
        if config.checkpoint_interval == 'auto':  # only after evaluations
            return False
        return progress.iter_num % config.checkpoint_interval == 0

    @contextmanager
    def save_on_error(self):
        """If training fails, save the last complete step and tell the user how to resume. Only a
        single process can: with several, the others would wait for one that has failed."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # the original error matters more
                if launched_world().size == 1 and not self.progress.updating:
                    self.step.bad_steps.report(self)
                    self.save()
                    self.saver.wait()
                    if self.progress.saved_at and not self.saver.failed:
                        error.add_note(f'saved iteration {self.progress.saved_at}; to resume: '
                                       f'{command_for("train")} '
                                       f'--out_dir={quoted(self.config.out_dir)} '
                                       '--init_from=resume')
            raise

    def reason_to_stop(self, is_last):
        """Why the run stops at this iteration, or None if it continues; the same on all ranks."""
        patience, progress = self.config.patience, self.progress
        if stop_signal := self.stop.agreed_signal():
            return stop_signal
        if self.step.bad_steps.gave_up:
            return self.step.bad_steps.gave_up
        if is_last:
            return TIME_UP if self.config.minutes else FINISHED
        if 0 < patience <= progress.evals_since_best:
            evaluations = count_of(progress.evals_since_best, 'evaluation')
            return f'patience={patience}: validation loss did not improve on ' \
                   f'{progress.best_val_loss:.4f} in the last {evaluations}'
        return None
