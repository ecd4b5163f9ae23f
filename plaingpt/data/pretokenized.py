"""Corpora that others tokenized: .bin shards with llm.c's header, downloaded or linked to."""

from pathlib import Path

import numpy as np

from plaingpt.data.dataset import FORMAT_VERSION
from plaingpt.data.hub import explain_hub_errors
from plaingpt.data.shards import check_free_space, read_journal, write_journal
from plaingpt.data.token_files import open_tokens
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.system.errors import UserError, needs
from plaingpt.system.files import sha256_of, write_json


def fetch_shards(corpus, folder, command):
    """Put the shards of `corpus` and a meta.json into `folder`. Raises UserError."""
    chosen = link_shards(folder, command) if command['input'] \
        else download_shards(corpus.hub, folder, command)
    splits = {}
    for split, names in chosen.items():
        opened = [open_tokens(folder / name, np.dtype('<u2')) for name in names]
        for file in opened:
            file.sampled_sha256(GPT2Tokenizer.vocab_size)  # sees whether these are GPT-2's tokens
        files = [{'name': file.path.name, 'sha256': sha256_of(file.path), 'tokens': file.tokens}
                 for file in opened]
        splits[split] = {'tokens': sum(file['tokens'] for file in files), 'files': files}
    write_json(folder / 'meta.json',
               {'format_version': FORMAT_VERSION, 'dtype': 'uint16',
                'vocab_size': GPT2Tokenizer.vocab_size, 'tokenizer': {'kind': 'gpt2'},
                'splits': splits, 'source': command})


def choose_shards(names, max_shards, where):
    """{split: names}, the first `max_shards` of train (0: all). Raises UserError."""
    chosen = {split: sorted(name for name in names
                            if name.endswith('.bin') and f'_{split}_' in f'_{name}')
              for split in ('train', 'val')}
    for split, found in chosen.items():
        if not found:
            raise UserError(f'{where}: no *_{split}_*.bin there')
    chosen['train'] = chosen['train'][:max_shards or None]
    return chosen


def link_shards(folder, command):
    """Link to the shards in command['input'] → {split: names}."""
    names = [path.name for path in Path(command['input']).glob('*.bin')]
    chosen = choose_shards(names, command['max_shards'], command['input'])
    read_journal(folder, command)
    for name in chosen['train'] + chosen['val']:
        (folder / name).symlink_to((Path(command['input']) / name).resolve())
    return chosen


def download_shards(repo, folder, command):
    """Download those shards that the same command has not downloaded before → {split: names}."""
    with needs('huggingface_hub', repo):
        import huggingface_hub
    advice = 'check the connection; the same command resumes from here'
    with explain_hub_errors(repo, advice):
        info = huggingface_hub.HfApi().dataset_info(repo, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings}
    chosen = choose_shards(files, command['max_shards'], repo)
    sizes = {name: files[name].size or 0 for name in chosen['train'] + chosen['val']}
    print(f'{len(sizes)} files, {sum(sizes.values()) / 1e9:.1f} GB')
    need = sum(size for name, size in sizes.items() if not (folder / name).exists())
    check_free_space(folder, need, 'take fewer with --max_shards=…, ')
    read_journal(folder, command)
    write_journal(folder, {'command': command})
    for name in sizes:
        with explain_hub_errors(repo, advice):  # info.sha: so that all are of one version
            huggingface_hub.hf_hub_download(repo, name, repo_type='dataset', local_dir=folder,
                                            revision=info.sha)
        lfs = files[name].lfs
        if lfs and sha256_of(folder / name) != lfs.sha256:
            (folder / name).unlink()
            raise UserError(f'{repo}/{name}: what arrived has another checksum: run the same '
                            'command again')
    return chosen
