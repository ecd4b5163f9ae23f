"""How fast prepare.py is, and how much memory it takes: compare_prepare.py [MEGABYTES] [ROUNDS]

On the same text and cores, GPT-2 tokens: the recipe that nanoGPT's openwebtext/prepare.py made
known (datasets.map with tiktoken a document, then a memory map written in 1,024 parts);
tiktoken.encode_ordinary_batch alone on texts in memory; prepare.py; and prepare.py on a tenth of
the text, to compare its memory, which is the sum over all processes (PSS; Linux only).
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from itertools import count
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))

RECIPE = '''
import sys, numpy as np, tiktoken
from datasets import load_dataset
folder, out, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
encoding = tiktoken.get_encoding('gpt2')

def process(row):
    ids = encoding.encode_ordinary(row['text'])
    ids.append(encoding.eot_token)
    return {'ids': ids, 'len': len(ids)}

rows = load_dataset(folder, split='train', num_proc=cores, cache_dir=out + '/cache')
splits = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
for split, rows in splits.map(process, remove_columns=['text'], num_proc=cores).items():
    length = int(np.sum(rows['len'], dtype=np.uint64))
    tokens = np.memmap(f'{out}/{split}.bin', dtype=np.uint16, mode='w+', shape=(length,))
    at, parts = 0, min(1024, len(rows))
    for part in range(parts):
        batch = rows.shard(num_shards=parts, index=part, contiguous=True).with_format('numpy')
        ids = np.concatenate(batch['ids'])
        tokens[at:at + len(ids)] = ids
        at += len(ids)
    tokens.flush()
'''

ALONE = '''
import sys, time, pyarrow.parquet, pathlib, tiktoken
folder, cores = sys.argv[1], int(sys.argv[2])
texts = [text for path in sorted(pathlib.Path(folder).glob('*.parquet'))
         for text in pyarrow.parquet.read_table(path)['text'].to_pylist()]
encoding = tiktoken.get_encoding('gpt2')
encoding.encode_ordinary('warm')
start = time.perf_counter()
encoding.encode_ordinary_batch(texts, num_threads=cores)
print(time.perf_counter() - start)
'''


def documents():
    """Yield real text without end: the source of Python's standard library and of all installed
    packages, in parts as long as a web page. A number in front makes repeated parts differ."""
    folders = {sysconfig.get_paths()[name] for name in ('stdlib', 'purelib')}
    texts = []
    for path in sorted({path for folder in folders for path in Path(folder).rglob('*.py')}):
        text = path.read_bytes().decode('utf-8', 'ignore')
        texts += [text[i:i + 5000] for i in range(0, len(text), 5000)]
    for repeat in count():
        yield from (f'{repeat} {text}' for text in texts)


def write_corpus(folder, megabytes):
    """Parquet files of 50 MB of text each, laid out like a dataset of the hub."""
    import pyarrow
    import pyarrow.parquet
    folder.mkdir()
    texts, size, total = [], 0, 0
    for text in documents():
        texts.append(text)
        size += len(text.encode())
        if size >= min(50, megabytes) * 1e6:
            path = folder / f'train-{total:012d}.parquet'
            pyarrow.parquet.write_table(pyarrow.table({'text': texts}), path, row_group_size=1000)
            texts, size, total = [], 0, total + size
            if total >= megabytes * 1e6:
                return total


def measure_memory(pid):
    """Memory of a process and its descendants in bytes; shared pages count once."""
    total = 0
    try:
        for line in Path(f'/proc/{pid}/smaps_rollup').read_text().splitlines():
            if line.startswith('Pss:'):
                total += int(line.split()[1]) * 1024
        for task in Path(f'/proc/{pid}/task').iterdir():
            total += sum(measure_memory(child) for child in (task / 'children').read_text().split())
    except OSError:  # it ended meanwhile
        pass
    return total


def measure(*command):
    """Run a Python command → (seconds, peak memory, its output)."""
    start = time.perf_counter()
    peak = 0
    with tempfile.TemporaryFile('w+') as out:
        process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=out,
                                   stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, measure_memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        out.seek(0)
        if process.returncode:
            sys.exit(out.read())
        return seconds, peak, out.read()


def main(megabytes=500, rounds=3):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        size = write_corpus(folder / 'corpus', megabytes) / 1e6
        tenth = write_corpus(folder / 'tenth', megabytes // 10) / 1e6
        print(f'{size:.0f} MB of text, {CORES} cores, {rounds} rounds', flush=True)
        times = defaultdict(list)
        for i in range(rounds):
            (folder / f'recipe-{i}').mkdir()
            seconds, recipe_peak, _ = measure('-c', RECIPE, folder / 'corpus',
                                              folder / f'recipe-{i}', CORES)
            times['recipe'].append(seconds)
            output = measure('-c', ALONE, folder / 'corpus', CORES)[2]
            times['alone'].append(float(output.split()[-1]))
            out = folder / f'prepare-{i}'
            seconds, peak, output = measure('prepare.py', 'hf', f'--path={folder}/corpus',
                                          '--val_fraction=0.0005', f'--data_dir={out}')
            times['prepare'].append(seconds)
            times['encoding'].append(float(output.split(' tokens in ')[1].split()[0]))
        meta = json.loads((out / 'meta.json').read_text())
        tokens = sum(split['tokens'] for split in meta['splits'].values())
        recipe_bytes = sum(path.stat().st_size for path in (folder / 'recipe-0').glob('*.bin'))
        if 2 * tokens != recipe_bytes:
            sys.exit(f'{tokens:,} tokens, but {recipe_bytes // 2:,} by the recipe')
        labels = {'recipe': f'recipe of nanoGPT, peak {recipe_peak / 1e6:,.0f} MB',
                  'prepare': f'prepare.py, peak {peak / 1e6:,.0f} MB',
                  'alone': 'tiktoken.encode_ordinary_batch alone',
                  'encoding': 'prepare.py, its encoding alone'}
        for name, label in labels.items():
            seconds = median(times[name])
            print(f'{seconds:8.2f} s {tokens / seconds / 1e6:6.2f}M tokens/s  {label}  '
                  f'({", ".join(f"{t:.2f}" for t in times[name])})')
        print(f'{median(times["recipe"]) / median(times["prepare"]):.2f}x the speed of the recipe, '
              f'{median(times["alone"]) / median(times["encoding"]):.2f}x that of tiktoken alone')
        seconds, tenth_peak, _ = measure('prepare.py', 'hf', f'--path={folder}/tenth',
                                      '--val_fraction=0.0005', f'--data_dir={folder}/d')
        print(f'{seconds:8.2f} s for {tenth:.0f} MB, peak {tenth_peak / 1e6:,.0f} MB')


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
