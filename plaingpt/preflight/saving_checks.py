"""Does a checkpoint hold all that training goes on from?"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model import GPT
from plaingpt.preflight.subject import NotChecked
from plaingpt.system.devices import rng_state
from plaingpt.training.checkpoint import open_checkpoint
from plaingpt.training.checkpoint_writer import Saver, optimizer_tensors
from plaingpt.training.optimizers import build_optimizer
from plaingpt.training.progress import Progress

CPU = torch.device('cpu')
BYTES = {'kind': 'byte'}  # a tokenizer of few tokens


def checkpoints_come_back(subject):
    """A small model with the flags of this one is trained for a step, saved and loaded."""
    shape = subject.model.config
    shape = replace(shape, vocab_size=257, n_layer=min(2, shape.n_layer), n_embd=8 * shape.n_head,
                    block_size=min(16, shape.block_size), dropout=0.0)
    with subject.training_mode():
        model = GPT(shape)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.02)
        config = replace(subject.config, learning_rate=1e-6)  # with 1e9 nothing would be finite
        optimizer = build_optimizer(model, config, 'cpu')
        idx = torch.randint(0, shape.vocab_size, (2, shape.block_size))
        model(idx, idx)[1].backward()
        optimizer.step()
        try:
            with TemporaryDirectory() as folder:
                found = save(model, optimizer, folder)
                loaded = found.load_model()
                again = build_optimizer(loaded, config, 'cpu')
                found.load_optimizer(again, loaded)
        except OSError as e:
            raise NotChecked(f'there is no folder for temporary files: {e.strerror or e}') from None
    with torch.no_grad():
        lost = [name for name, p in model.state_dict().items()
                if not torch.equal(p, loaded.state_dict()[name])]
        if lost or not torch.equal(model(idx)[0], loaded(idx)[0]):
            return f'a model that is saved and loaded differs{" in " * bool(lost)}' \
                   f'{", ".join(lost[:4])}: what is not a parameter is not in a checkpoint, and ' \
                   'what is tied must be tied again'
        before, after = (optimizer_tensors(*pair) for pair in
                         ((optimizer, model), (again, loaded)))
        lost = [name for name in {**before, **after}
                if name not in after or not torch.equal(before[name], after[name])]
        if lost:
            return f'an optimizer that is saved and loaded differs in {", ".join(lost[:4])}: ' \
                   'what it remembers of a parameter must be in its state'



def save(model, optimizer, folder):
    """→ Checkpoint. Raises OSError."""
    saver = Saver(folder, alone=True)
    saver.save(model, optimizer, {
        **Progress(iter_num=1).state(), 'config': {}, 'tokenizer': BYTES, 'data': '', 'samples': {},
        'sequences': 0, 'elapsed_s': 0.0, 'scaler': {}}, rng_state(CPU))
    if saver.failed:
        raise OSError(f'{folder} cannot be written')
    return open_checkpoint(next(Path(folder, 'checkpoints').iterdir()))
