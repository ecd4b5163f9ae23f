"""Where a run stands: when it evaluates, saves and ends, and how it continues after a resume."""

import math
from dataclasses import dataclass, replace

from plaingpt.monitoring.metrics_file import finite
from plaingpt.system.devices import set_rng_state
from plaingpt.system.distributed import print0
from plaingpt.system.formatting import quoted
from plaingpt.training import averaging


@dataclass
class Progress:
    """Where a run stands: what a checkpoint keeps of the loop."""

    iter_num: int = 0  # updates made
    best_val_loss: float = math.inf
    evals_since_best: int = 0
    evaluated_at: int | None = None  # the iteration of the last evaluation
    val_loss: float | None = None  # that it measured
    saved_at: int | None = None  # the iteration of the last checkpoint
    saved_evaluated: bool = False  # that checkpoint has its evaluation
    eval_sequences: int = 0  # that each evaluation reads of a split

    @property
    def evaluated(self):
        """Whether this iteration was evaluated."""
        return self.evaluated_at == self.iter_num

    def evaluation_is_due(self, config):
        """Whether there is something to measure here that has not been."""
        return not self.evaluated and (
            self.loss_is_due(config) or self.sample_is_due(config))

    def loss_is_due(self, config):
        last = config.eval_only or self.iter_num >= config.max_iters
        return last or self.iter_num % config.eval_interval == 0

    def sample_is_due(self, config):
        interval = config.sample_interval
        return self.iter_num > 0 and interval > 0 and self.iter_num % interval == 0 \
            and not config.eval_only

    def record_evaluation(self, val_loss):
        """val_loss: None where it was not due. → whether it is the best so far."""
        self.evaluated_at, self.val_loss = self.iter_num, val_loss
        if val_loss is None:
            return False
        best = val_loss < self.best_val_loss
        if best:
            self.best_val_loss = val_loss
        self.evals_since_best = 0 if best else self.evals_since_best + 1
        return best

    def save_is_due(self, config):
        evaluated = self.evaluated and self.val_loss is not None
        best = evaluated and self.evals_since_best == 0
        return best or (evaluated and config.always_save_checkpoint) \
            or (config.checkpoint_interval != 'auto'
                and self.iter_num % config.checkpoint_interval == 0)

    def is_saved(self):
        """Whether there is a checkpoint of this iteration, with its evaluation if there was one."""
        return self.saved_at == self.iter_num \
            and (self.saved_evaluated or not self.evaluated)

    def state(self):
        """What a checkpoint of this iteration keeps, as JSON."""
        return {'iter_num': self.iter_num, 'evaluated': self.evaluated,
                'val_loss': finite(self.val_loss) if self.evaluated else None,
                'best_val_loss': finite(self.best_val_loss),
                'evals_since_best': self.evals_since_best,
                'eval_sequences': self.eval_sequences}

    def describe_end(self, config, ending, signal):
        """What to say when a run has ended, a line each. signal: the name of the one that ended it,
        or None."""
        out_dir, lines = config.out_dir, []
        if signal:
            lines.append(f'{signal}: stopped after iteration {self.iter_num}' + (
                f', which is saved; python train.py --out_dir={quoted(out_dir)} --init_from=resume '
                'continues from there' if self.saved_at == self.iter_num else ''))
        elif self.iter_num < config.max_iters and not config.eval_only:
            lines.append(f'stopped after iteration {self.iter_num}, {ending}')
        if self.iter_num and not signal and not config.eval_only:
            best = ' --checkpoint=best takes those before the validation loss rose from ' \
                   f'{self.best_val_loss:.4f}' if self.evals_since_best else ''
            lines.append(f'done: {out_dir}/checkpoints has the weights; '
                         f'python sample.py --out_dir={quoted(out_dir)}{best}')
        return lines

    def print_end(self, config):
        """Say so where a run that is resumed has nothing left to do."""
        if self.evaluated and (ending := self.ending(config)):
            print0(f'iteration {self.iter_num} is the end already, {ending}: a larger '
                   '--max_iters, --minutes, or --patience=0, makes it longer')

    def ending(self, config):
        """Why the run ends here, or None."""
        if config.eval_only or self.iter_num >= config.max_iters:
            return 'all iterations are done'
        if 0 < config.patience <= self.evals_since_best:
            return f'patience={config.patience}: {self.evals_since_best} evaluations brought no ' \
                   f'validation loss below {self.best_val_loss:.4f}'
        return None


def resumed_eval_sequences(state, config):
    """How many sequences an evaluation of a resumed run reads: as many as before, also with another
    batch size, so that its losses compare; unless the settings ask for another number."""
    before = replace(config, **{key: state['config'].get(key, getattr(config, key))
                                for key in ('eval_iters', 'batch_size')})
    if before.eval_iters != config.eval_iters:
        return config.eval_sequences()
    return state['eval_sequences'] or before.eval_sequences()


def restore(resumed, config, model, optimizer, scaler, train_data, world, device):
    """Put back what a checkpoint holds beside the weights → Progress."""
    if not resumed:
        return Progress(eval_sequences=config.eval_sequences())
    state, iter_num = resumed.state, resumed.iter_num
    resumed.load_optimizer(optimizer, model)
    averaging.go_on(optimizer, config.average_decay,
                    iter_num if state['averaged_steps'] is None else state['averaged_steps'])
    if state['scaler']:  # empty where the run was not in float16 so far
        scaler.load_state_dict(state['scaler'])
    train_data.resume_at(iter_num, state['sequences'])
    set_rng_state(state['rng'], world.rank, device)
    evaluated = state['evaluated'] and not config.eval_only
    best = state['best_val_loss']
    return Progress(iter_num, math.inf if best is None else best, state['evals_since_best'],
                    evaluated_at=iter_num if evaluated else None, val_loss=state['val_loss'],
                    saved_at=iter_num, saved_evaluated=evaluated,
                    eval_sequences=resumed_eval_sequences(state, config))
