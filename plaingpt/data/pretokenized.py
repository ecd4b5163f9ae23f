"""Corpora that others tokenized: .bin shards with llm.c's header, downloaded or linked to, and the
files that datatrove's DocumentTokenizer writes, linked to."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plaingpt.data import tokenizers
from plaingpt.data.hub import explain_hub_errors
from plaingpt.data.shards import empty, read_progress, write_meta, write_progress
from plaingpt.data.token_files import check_ids, open_tokens
from plaingpt.data.tokenizer_choice import borrow_tokenizer
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError, needs, progress_bar, warn
from plaingpt.system.files import sha256_of

GPT2_NAMES = 'gpt2', 'openai-community/gpt2'  # as datatrove has them
ADVICE = 'check the connection; the same command resumes from here'


def fetch_shards(repo, where, max_shards, folder, command):
    """Put the shards that lie in `where`, or those of a repository on the hub where that is '', and
    a meta.json into `folder`: the first `max_shards` of train, 0 for all. Raises UserError."""
    version, sums = ('', {path.name: None for path in Path(where).glob('*.bin')}) if where \
        else list_repo(repo)
    chosen = {split: sorted(name for name in sums
                            if name.endswith('.bin') and f'_{split}_' in f'_{name}')
              for split in ('train', 'val')}
    chosen['train'] = chosen['train'][:max_shards or None]
    if where or not read_progress(folder, command):
        empty(folder)
        write_progress(folder, command)  # what is downloaded already stays after a kill
    splits = {}
    for split, names in chosen.items():
        if not names:
            raise UserError(f'{where or repo}: no *_{split}_*.bin there')
        for name in names:
            if where:
                (folder / name).symlink_to(Path(where, name).resolve())
            else:
                download(repo, name, version, sums[name], folder)
        opened = [open_tokens(folder / name, np.dtype('<u2')) for name in names]
        for file in opened:
            file.sampled_sha256(GPT2Tokenizer.vocab_size)  # sees whether these are GPT-2's tokens
        files = [{'name': file.path.name, 'sha256': sha256_of(file.path), 'tokens': file.tokens}
                 for file in opened]
        splits[split] = {'tokens': sum(file['tokens'] for file in files), 'files': files}
    write_meta(folder, np.dtype('<u2'), GPT2Tokenizer(), splits, command)


def list_sizes(folder):
    """[name, size] of the token files in a folder; none where that is ''."""
    paths = [path for path in sorted(Path(folder).glob('*'))
             if path.suffix in ('.bin', '.ds')] if folder else []
    return [[path.name, path.stat().st_size] for path in paths]


def list_repo(repo):
    """→ (the version of a repository, {name of a file: its checksum, or None})"""
    with needs('huggingface_hub', repo):
        import huggingface_hub
    with explain_hub_errors(repo, ADVICE):
        info = huggingface_hub.HfApi().dataset_info(repo, files_metadata=True)
    return info.sha, {file.rfilename: file.lfs and file.lfs.sha256 for file in info.siblings}


def download(repo, name, version, sha256, folder):
    """Raises UserError, also where what arrives has another checksum than the hub has."""
    import huggingface_hub
    with explain_hub_errors(repo, ADVICE):
        huggingface_hub.hf_hub_download(repo, name, repo_type='dataset', local_dir=folder,
                                        revision=version)
    if sha256 and sha256_of(folder / name) != sha256:
        (folder / name).unlink()
        raise UserError(f'{repo}/{name}: what arrived has another checksum: run the same command '
                        'again')


# -----------------------------------------------------------------------------
# https://github.com/huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py


class Shard(NamedTuple):
    path: Path  # NAME.ds, token ids without a header
    ends: np.ndarray  # of its documents, in tokens: NAME.ds.index
    width: int  # bytes of an id
    tokenizer: str  # the name or path that DocumentTokenizer was given: NAME.ds.metadata; or ''


def find_datatrove(folder, max_shards):
    """What DocumentTokenizer wrote to `folder`, in the order of names, the first `max_shards` (0:
    all) → [Shard]. Raises UserError."""
    # A task that gets no documents leaves an empty file.
    paths = [path for path in sorted(Path(folder).glob('*.ds')) if path.stat().st_size]
    if not paths:
        raise UserError(f'{folder}: no *.ds with tokens there: --input is the output_folder of '
                        "datatrove's DocumentTokenizer")
    shards = [read_shard(path) for path in paths[:max_shards or None]]
    for shard in shards:
        if shard[2:] != shards[0][2:]:
            raise UserError(f'{shard.path} and {shards[0].path} are of different tokenizers: '
                            'prepare each from a folder of its own')
    return shards


def read_shard(path):
    """NAME.ds → Shard. Raises UserError."""
    size, index, about = path.stat().st_size, Path(f'{path}.index'), Path(f'{path}.metadata')
    try:
        data = index.read_bytes()
        text = about.read_text(encoding='utf-8', errors='replace') if about.exists() else ''
    except OSError as e:
        raise UserError(f'{e.filename}: {e.strerror}: DocumentTokenizer writes it at its '
                        'end, with save_index=True; copy all its files') from None
    tokenizer, _, said = text.partition('\n')[0].rpartition('|')
    ends = np.frombuffer(data, '<u8', len(data) // 8)
    last = int(ends[-1]) if len(ends) else 0
    width = next((width for width in (2, 4) if last * width == size), 0)
    if not width or said not in ('', str(width)) or (ends[1:] < ends[:-1]).any():
        raise UserError(f'{index} does not fit {path.name}: it ends at token {last:,}, and there '
                        f'are {size:,} bytes: copy all files of datatrove, or run it again')
    return Shard(path, ends.astype(np.int64), width, tokenizer)


def datatrove_tokenizer(shards, asked):
    """The tokenizer of [Shard]: --tokenizer, or GPT-2's where their files name it. UserError"""
    path, name = shards[0].path, shards[0].tokenizer
    if asked == 'auto' and name in GPT2_NAMES:
        asked = 'gpt2'
    if tokenizers.is_name(asked) and asked not in ('gpt2', 'byte'):
        raise UserError(f'{path}.metadata names the tokenizer {name!r}: name it with --tokenizer, '
                        'as the dataset or run that has it, or as gpt2 or byte')
    if name in GPT2_NAMES and asked != 'gpt2':
        raise UserError(f'tokenizer={asked}: {path}.metadata names another one, {name}: leave '
                        '--tokenizer out')
    return tokenizers.from_json({'kind': asked}) if tokenizers.is_name(asked) \
        else borrow_tokenizer(asked)


def link_datatrove(shards, tokenizer, folder, command, val_fraction):
    """Link to `shards` from `folder` and write its meta.json. Raises UserError."""
    width = shards[0].width
    if tokenizer.vocab_size > 256**width:
        raise UserError(f'{shards[0].path}: ids of {width} bytes, too few for the '
                        f'{tokenizer.vocab_size:,} of the tokenizer: name the right --tokenizer')
    empty(folder)
    splits = {split: {'tokens': 0, 'documents': 0, 'files': []} for split in ('train', 'val')}
    with progress_bar('reading', sum(int(shard.ends[-1]) for shard in shards), 'tokens') as bar:
        for split, shard, start, end in cut_shards(shards, val_fraction):
            entry = splits[split]
            path = folder / f'{split}_{len(entry["files"]):06d}.bin'
            path.symlink_to(shard.path.resolve())
            file = open_tokens(path, np.dtype(f'<u{width}'), end - start, offset=start * width)
            digest = hashlib.sha256()
            for at, ids in file.pieces():
                check_ids(shard.path, ids, start + at, tokenizer.vocab_size)
                digest.update(ids)
                entry['documents'] += int(np.count_nonzero(ids == tokenizer.end_of_text))
                entry['tokens'] += len(ids)
                bar.update(sum(entry['tokens'] for entry in splits.values()) - bar.n)
            entry['files'].append({'name': path.name, 'tokens': file.tokens, 'offset': file.offset,
                                   'sha256': digest.hexdigest()})
    write_meta(folder, file.dtype, tokenizer, splits, command)
    if tokenizer.end_of_text is not None and not splits['train']['documents']:
        warn("no document has an end-of-text token: eos_token='<|endoftext|>' of "
             'DocumentTokenizer adds it')


def cut_shards(shards, val_fraction):
    """Yield (split, shard, first token, end): the last documents of each shard are for validation,
    so many that all shards up to it together have their share."""
    documents = 0
    for shard in shards:
        before, documents = documents, documents + len(shard.ends)
        held_out = round(val_fraction * documents) - round(val_fraction * before)
        cut = int(shard.ends[-held_out - 1]) if held_out < len(shard.ends) else 0
        if cut:
            yield 'train', shard, 0, cut
        if held_out:
            yield 'val', shard, cut, int(shard.ends[-1])
