"""The texts that the weights of a run were trained on: sketches in its folder (data/overlap.py)."""

import numpy as np

from plaingpt.data.overlap import (
    describe_share,
    print_share,
    read_sketches,
    share_trained_on,
    sketch_of,
    windows_of,
)
from plaingpt.monitoring.run_record import TRAINED_ON

MIN_OVERLAP = 0.01  # smaller overlaps between the corpora of a mixture are not reported


def trained_on(weights):
    """Sketches of the texts that these weights were trained on; [] if they are unknown."""
    return read_sketches(weights.path.parent.parent / TRAINED_ON) if weights.state else []


def sketch_texts(start, dataset, train_data, val_data):
    """Sketch the texts that a new run trains on, including those that its initial weights were
    trained on. Prints how much of the validation text was in the latter, and how much of each
    corpus's validation text is in the training text of another corpus. Returns a list of Sketch."""
    names = [part.name for part in dataset.components]
    sketches = [sketch_of(loader.stream) for loader in train_data.components]
    earlier_sketches = trained_on(start.weights) if start.weights else []
    for name, loader in zip(names, val_data.components, strict=True):
        if len(sketches) == 1 and not earlier_sketches:
            break  # prepare.py has compared the splits
        text = f'the validation text of {name}' if name else 'the validation text'
        windows = windows_of(loader.stream)
        if earlier_sketches:
            share = share_trained_on(*windows, earlier_sketches)
            where = f'the training text of {start.weights.source}'
            print_share(share, describe_share(share, text, where),
                        'validate on text that it was not trained on')
        for other_name, sketch in zip(names, sketches, strict=True):
            if other_name == name:
                continue
            share = share_trained_on(*windows, [sketch])
            if share and share > MIN_OVERLAP:
                where = f'the training split of {other_name}'
                print_share(share, describe_share(share, text, where),
                            'remove the copies there, or leave one of them out')
    return sketches + [earlier for earlier in earlier_sketches if not is_among(earlier, sketches)]


def is_among(sketch, sketches):
    return any(np.array_equal(sketch.hashes, each.hashes) for each in sketches)
