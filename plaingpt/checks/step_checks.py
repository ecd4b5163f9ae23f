"""Checks of a step and of checkpoints, with a small model that has the flags of the run's."""

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from plaingpt.checks.subject import NotChecked, largest_change
from plaingpt.system.devices import rng_state
from plaingpt.system.errors import UserError
from plaingpt.training.checkpoint import open_checkpoint
from plaingpt.training.checkpoint_writer import Saver, optimizer_tensors
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.step_guard import StepGuard

CPU = torch.device('cpu')
BYTES = {'kind': 'byte'}  # a tokenizer of few tokens
NEARLY_SAME = 1e-3  # of a gradient's RMS: sums in another order


def steps_follow_the_gradient(subject):
    """The step of the training loop, of two micro-batches, beside a plain one."""
    with subject.training_mode():
        model, optimizer, config = subject.small_model()
        idx = torch.randint(0, 257, (2, 2, model.config.block_size), device=subject.device)
        named = dict(model.named_parameters())
        with subject.training_mode():  # both draw the same random numbers
            plain = sum(model(tokens, tokens)[1] for tokens in idx) / 2
        gradients = torch.autograd.grad(plain, list(named.values()), allow_unused=True)
        scaler = torch.amp.GradScaler(subject.device.type, enabled=False)
        with subject.training_mode():
            batches = iter([(tokens, tokens) for tokens in idx])
            loss = subject.forward_backward(model, batches, 2, scaler, nullcontext())
        seen, mean = loss.item(), plain.item()
        if not abs(seen - mean) <= NEARLY_SAME * abs(mean):
            return f'a step says that two micro-batches have a loss of {seen:.4f}, and their ' \
                   f'mean is {mean:.4f}'
        for (name, p), gradient in zip(named.items(), gradients, strict=True):
            if gradient is not None and (
                    p.grad is None or largest_change(p.grad, gradient) > NEARLY_SAME):
                return f'the gradient of {name} is not that of the mean loss of two ' \
                       'micro-batches: its sign, its scale, or one of them is left out'
        before = [p.detach().clone() for p in named.values()]
        subject.update(model, optimizer, scaler, config.grad_clip,
               StepGuard(None, None, subject.device), 0, loss)
        if any(p.grad is not None and p.grad.any() for p in named.values()):
            return 'gradients are left when a step has ended, and add up to the next: zero_grad'
        along = sum(float(((p.detach() - old) * gradient).sum()) for p, old, gradient
                    in zip(named.values(), before, gradients, strict=True) if gradient is not None)
        if not along < 0:
            return 'a step moves no weight' if along == 0 else \
                'a step moves the weights up the gradient, so that the loss rises'


def checkpoints_come_back(subject):
    """Training for a step, saved and loaded."""
    with subject.training_mode():
        model, optimizer, config = subject.small_model()
        idx = torch.randint(0, 257, (2, model.config.block_size), device=subject.device)
        model(idx, idx)[1].backward()
        optimizer.step()
        try:
            with TemporaryDirectory() as folder:
                found = save_small(model, optimizer, folder)
                loaded = found.load_model(subject.device)
                again = build_optimizer(loaded, config, subject.device.type)
                found.load_optimizer(again, loaded)
        except OSError as e:
            raise NotChecked(f'there is no folder for temporary files: {e.strerror or e}') from None
        except UserError as problem:
            if not all(p.isfinite().all() for p in model.parameters()):
                raise NotChecked('its weights are not finite after a step') from None
            why = str(problem).rpartition(folder)[2].partition(': ')[2]
            return f'a small model that is saved cannot be loaded ({why}): are modules shared, ' \
                   'or parameters made in another way than by GPT(config)?'
    with torch.no_grad(), subject.training_mode(False):
        model.eval()
        loaded.eval()
        lost = [name for name, p in model.state_dict().items()
                if not torch.equal(p, loaded.state_dict()[name])]
        if lost or not torch.equal(model(idx)[0], loaded(idx)[0]):
            return f'a small model that is saved and loaded differs{" in " * bool(lost)}' \
                   f'{", ".join(lost[:4])}: what is not a parameter is not in a checkpoint, and ' \
                   'what is tied must be tied again'
        before, after = (optimizer_tensors(*pair) for pair in
                         ((optimizer, model), (again, loaded)))
        lost = [name for name in {**before, **after}
                if name not in after or not torch.equal(before[name], after[name])]
        if lost:
            return f'an optimizer that is saved and loaded differs in {", ".join(lost[:4])}: ' \
                   'what it remembers of a parameter must be in its state'


def save_small(model, optimizer, folder):
    """→ Checkpoint. Raises OSError."""
    saver = Saver(folder, alone=True)
    saver.save(model, optimizer, {
        'iter_num': 1, 'val_loss': None, 'config': {}, 'tokenizer': BYTES, 'data': '',
        'samples': {}, 'sequences': 0, 'elapsed_s': 0.0, 'scaler': {}}, rng_state(CPU))
    if saver.failed:
        raise OSError(f'{folder} cannot be written')
    return open_checkpoint(next(Path(folder, 'checkpoints').iterdir()))
