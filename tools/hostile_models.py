"""Model files that are not what they say: what tools/torture_files.py lets commands read.

Each writer spoils the files in a folder `work` (out/ a run, hf/ its export, ckpt.pt)
→ (what it did, the command to read it).
"""

import hashlib
import json
import math
import shutil
import zipfile

import torch
from safetensors.torch import load_file, save_file

from plaingpt.training.checkpoint import find

SIZES = ('n_layer', 'n_embd', 'n_head', 'block_size', 'vocab_size')
# Most are such as a model could have.
HUGE = (*4 * (10**9, 2**30, 10**6, 2**20), 2**63, 10**30, 0, -1, -2**31, 1.5, 1e9,
        'x', None, True, [], math.nan)


def rewrite(path, chance):
    """Change the tensors of a safetensors file so that they are no weights."""
    weights = load_file(path)
    name = chance.choice(sorted(weights))
    w = weights[name]
    match chance.randrange(8):
        case 0:
            weights[name] = w.to(chance.choice((torch.int8, torch.uint8, torch.bool, torch.int64)))
        case 1:
            w.view(-1)[chance.randrange(w.numel())] = chance.choice((math.nan, math.inf))
        case 2:
            del weights[name]
        case 3:
            weights[name] = w[..., :-1].contiguous()
        case 4:
            weights['transformer.h.9.attn.c_attn.weight'] = w.clone()
        case 5:
            weights[name] = w.to(torch.complex64)
        case 6:
            weights[name] = torch.zeros(0, 2**40)
        case 7:
            weights |= {f'transformer.h.{i}.ln_1.weight': torch.zeros(1) for i in range(20_000)}
    save_file(weights, path, metadata={'format': 'pt'})


def spoil_header(path, chance):
    """Let the head of a safetensors file say what is not so."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], 'little')
    head = json.loads(data[8:8 + n])
    entry = head[chance.choice([name for name in head if name != '__metadata__'])]
    match chance.randrange(6):
        case 0:
            entry['data_offsets'] = [0, 2**62]
        case 1:
            entry['data_offsets'][0] = 0
        case 2:
            entry['shape'] = [2**31, 2**31]
        case 3:
            entry['dtype'] = chance.choice(('F8_E4M3', 'X', 5))
        case 4:
            head = [[]]
        case 5:
            n = chance.choice((2**63, 2**32, 0))
    text = json.dumps(head).encode()
    n = len(text) if n == int.from_bytes(data[:8], 'little') else n
    path.write_bytes(n.to_bytes(8, 'little') + text + data[8 + int.from_bytes(
        data[:8], 'little'):])


def hostile_folder(work, chance):
    folder = work / 'hf'
    way = chance.choice(('config', 'config', 'weights', 'head'))
    if way == 'config':
        path = folder / 'config.json'
        config = json.loads(path.read_text())
        keys = {'n_layer': 'n_layer', 'n_embd': 'n_embd', 'n_head': 'n_head',
                'block_size': 'n_positions', 'vocab_size': 'vocab_size'}
        for key in chance.sample(SIZES, chance.choice((1, 1, 2))):
            config[keys[key]] = chance.choice(HUGE)
        path.write_text(json.dumps(config))
    else:
        (rewrite if way == 'weights' else spoil_header)(folder / 'model.safetensors', chance)
    return f'folder, {way}', 'sample hf'


def hostile_llama(work, chance):
    """No tensor vouches for the positions of a rotary model, or for its heads."""
    folder = work / 'hf'
    (folder / 'config.json').write_text(json.dumps({
        'model_type': 'llama', 'vocab_size': 300, 'num_hidden_layers': 2, 'hidden_size': 32,
        'num_attention_heads': chance.choice((1, 2, 10**9, -1)), 'rms_norm_eps': 1e-5,
        'max_position_embeddings': chance.choice((10**9, 2**30, 2**62)), 'hidden_act': 'silu'}))
    return 'folder, llama', 'sample hf'


class Call:
    """A pickle that calls `function` on `arguments`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile_ckpt(work, chance):
    path = work / 'ckpt.pt'
    found = torch.load(path, weights_only=True)
    weights, args = found['model'], found['model_args']
    name = chance.choice(sorted(weights))
    w = weights[name]
    way = chance.choice(('sizes', 'sizes', 'stride', 'shared', 'sparse', 'meta', 'type', 'nan',
                         'zip', 'deep', 'bytearray', 'cut', 'no tensor', 'subclass'))
    match way:
        case 'sizes':
            for key in chance.sample(SIZES, chance.choice((1, 1, 2))):
                args[key] = chance.choice(HUGE)
        case 'stride':
            weights[name] = torch.zeros(1).expand(10**9)
        case 'shared':
            args['n_layer'], one = 3000, torch.zeros(3 * 32, 32)
            weights |= {f'transformer.h.{i}.attn.c_attn.weight': one for i in range(3000)}
        case 'sparse':
            weights[name] = torch.sparse_coo_tensor([[0]], [1.0], (10**12,),
                                                    check_invariants=True)
        case 'meta':
            weights[name] = torch.empty(10**12, device='meta')
        case 'type':
            weights[name] = w.to(chance.choice((torch.int8, torch.bool, torch.complex64)))
        case 'nan':
            weights[name] = torch.full_like(w, math.nan)
        case 'deep':
            value = ()
            for _ in range(800):
                value = (value,)
            found['config'] = {value: 1}
            found['more'] = [deep(300)] * 10
            del found['model']
        case 'bytearray':
            found['more'] = Call(bytearray, 10**11)
        case 'no tensor':
            weights[name] = chance.choice(([], None, 'x', {}))
        case 'subclass':
            found['more'] = torch.nn.Buffer(w)
            weights[name] = [w]
    torch.save(found, path)
    if way == 'zip':
        with zipfile.ZipFile(path) as old:
            files = {member: old.read(member) for member in old.namelist()}
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as new:
            for member, data in files.items():
                new.writestr(member, data + bytes(10**6 * member.endswith('pkl')))
    if way == 'cut':
        path.write_bytes(path.read_bytes()[:-chance.randrange(1, 5000)])
    return f'ckpt.pt, {way}', 'sample pt'


def hostile_checkpoint(work, chance):
    path = state_of(work)
    state = json.loads(path.read_text())
    way = chance.choice(('sizes', 'sizes', 'rotary', 'weights', 'chunks'))
    if way == 'sizes':
        for key in chance.sample(SIZES, chance.choice((1, 1, 2))):
            state['model'][key] = chance.choice(HUGE)
    elif way == 'rotary':
        state['model'] |= {'rotary': True, 'block_size': 2**30}
    elif way == 'chunks':
        state['chunks'][0]['name'] = chance.choice((
            '../x.safetensors', '/dev/zero', 'model-00001-of-99999.safetensors', 5))
    else:
        chunk = next(chunk for chunk in state['chunks'] if chunk['kind'] == 'model')
        data = path.with_name(chunk['name'])
        (rewrite if chance.random() < 0.7 else spoil_header)(data, chance)
        chunk |= {'bytes': data.stat().st_size,
                  'sha256': hashlib.sha256(data.read_bytes()).hexdigest()}
    write_state(path, json.dumps(state))
    for other in path.parent.parent.iterdir():  # 'best' would take another one
        if other != path.parent:
            shutil.rmtree(other)
    return f'checkpoint, {way}', chance.choice(('sample', 'resume'))


def deep(levels):
    return [deep(levels - 1)] if levels else 'x'


def state_of(work):
    return find(work / 'out', 'latest').path / 'state.json'


def write_state(path, text):
    path.write_text(text, encoding='utf-8')
    path.with_name('state.json.sha256').write_text(hashlib.sha256(path.read_bytes()).hexdigest())


WRITERS = (hostile_folder, hostile_llama, hostile_ckpt, hostile_ckpt, hostile_checkpoint)
