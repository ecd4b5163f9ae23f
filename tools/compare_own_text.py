"""Learn a text of one's own for some minutes, beside nanoGPT, an older recipe of ours, and xz.

    python tools/compare_own_text.py notes.txt more.txt --nanogpt=FOLDER --minutes=5

Each text is split once. The programs run in turn, on a CPU, and each is scored by bits a byte over
the whole validation text: nanoGPT's CPU recipe with as many iterations as fit, on characters;
config/shakespeare_char_cpu_fast.py; config/own_text.py. What xz -9e needs for the validation text
is given alone, and after the training text. Two texts at once, a core each: OMP_NUM_THREADS=1.
"""

import argparse
import lzma
import math
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import CPU_RECIPE, run_and_watch, score_whole_split

from plaingpt.data.dataset import open_dataset
from plaingpt.experiments.tables import markdown
from plaingpt.system.files import ROOT, append_line

PROGRAMS = ['nanogpt', 'shakespeare_char_cpu_fast', 'own_text']


def prepare(text, folder, *options):
    """Split and tokenize a text → the folder."""
    subprocess.run([sys.executable, 'prepare.py', 'text', Path(text).resolve(), *options,
                    f'--data_dir={folder}'], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def texts_of(folder):
    """→ the training and the validation text of a dataset, as bytes."""
    data = open_dataset(folder)
    return (data.tokenizer().decode(stream.read(0, len(stream)).tolist()).encode()
            for stream in (data.split('train'), data.split('val')))


def xz_bits(text, before=b''):
    """What `xz -9e` takes for a text, in bits a byte. before: what it has seen"""
    sizes = [len(lzma.compress(given, preset=9 | lzma.PRESET_EXTREME))
             for given in (before, before + text)]
    return 8 * (sizes[1] - sizes[0] * bool(before)) / len(text)


def train_ours(program, dataset, minutes, folder):
    """→ (seconds, bits a byte), of its best checkpoint"""
    seconds, _ = run_and_watch(['train.py', f'config/{program}.py', f'--dataset={dataset}',
                                f'--minutes={minutes}', '--device=cpu', f'--out_dir={folder}'],
                               ROOT)
    return seconds, score_whole_split(f'--out_dir={folder}', f'{folder}/score.json', dataset,
                                      'bits_per_byte', 'best')


def train_nanogpt(nanogpt, dataset, minutes, folder):
    """→ (seconds, bits a byte), of its best checkpoint"""
    with open(Path(dataset, 'meta.pkl'), 'wb') as f:
        pickle.dump({'vocab_size': open_dataset(dataset).vocab_size}, f)

    def run(iters):
        return run_and_watch([*CPU_RECIPE, f'--dataset={dataset}', f'--out_dir={folder}',
                              f'--max_iters={iters}', f'--lr_decay_iters={iters}'], nanogpt)
    _, curve = run(500)  # it evaluates every 250
    begin, step = curve[0][0], (curve[2][0] - curve[0][0]) / 500
    seconds, _ = run(math.floor((60 * minutes - begin) / step))
    return seconds, score_whole_split(f'--init_from={folder}/ckpt.pt', f'{folder}/score.json',
                                      dataset, 'bits_per_byte')


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('texts', nargs='+')
    parser.add_argument('--nanogpt', required=True, help="nanoGPT's folder")
    parser.add_argument('--minutes', type=float, default=5)
    parser.add_argument('--programs', nargs='+', default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument('--save', help='a .jsonl to add what is found to')
    options = parser.parse_args(argv)
    rows = []
    for text in options.texts:
        with tempfile.TemporaryDirectory() as folder:
            ours = prepare(text, f'{folder}/ours')
            train, val = texts_of(ours)
            found = {'xz': (0, xz_bits(val)),
                     'xz, with the training text': (0, xz_bits(val, train))}
            for program in options.programs:
                out = f'{folder}/{program}'
                if program == 'nanogpt':
                    theirs = prepare(text, f'{folder}/characters', '--tokenizer=char')
                    found[program] = train_nanogpt(options.nanogpt, theirs, options.minutes, out)
                else:
                    found[program] = train_ours(program, ours, options.minutes, out)
        for program, (seconds, bits) in found.items():
            rows.append([Path(text).name, f'{len(train) / 1e6:.2f} MB', program, f'{seconds:.0f}',
                         f'{bits:.4f}'])
            if options.save:
                append_line(Path(options.save), {
                    'text': Path(text).name, 'train_bytes': len(train), 'val_bytes': len(val),
                    'minutes': options.minutes, 'program': program, 'seconds': seconds,
                    'bits_per_byte': bits})
        print(markdown(['text', 'to learn from', 'program', 'seconds', 'bits a byte'], rows))


if __name__ == '__main__':
    main(sys.argv[1:])
