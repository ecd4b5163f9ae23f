"""A step of training: its learning rate, its gradients, the update of the weights."""

import math
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def forward_backward(model, batches, micro_steps, scaler, context):
    """Add up the gradients of a step's micro-batches → this process's mean loss, on the device."""
    total_loss = 0.0
    for micro in range(micro_steps):
        idx, targets = next(batches)
        last = micro == micro_steps - 1
        # Gradients travel between processes once, with the last micro-batch's backward.
        with model.no_sync() if isinstance(model, DDP) and not last else nullcontext():
            with context:
                _, loss = model(idx, targets)
                loss = loss / micro_steps
            scaler.scale(loss).backward()
        total_loss += loss.detach()
    return total_loss


def update(model, optimizer, scaler, grad_clip, guard, it, loss):
    """Clip the gradient and move the weights, unless something is not finite → gradient norm."""
    if scaler.is_enabled():
        # With float16 an infinite gradient is everyday life: the scaler skips it and scales less.
        # Only the loss is judged, and the scaler, which looks at gradients alone, finds it there.
        bad = guard.judge(it, loss, loss)
        grad = next(p.grad for p in model.parameters() if p.grad is not None)
        grad.copy_(torch.where(bad.bool(), math.inf, grad))
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    if not scaler.is_enabled():
        optimizer.found_inf = guard.judge(it, loss, grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm
