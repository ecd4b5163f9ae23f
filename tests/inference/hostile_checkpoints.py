"""Files that someone made to do harm where a ckpt.pt of nanoGPT is expected."""

import io
import os
import pickle
import random
import struct
import tarfile
import zipfile

import torch

from model import GPT, GPTConfig
from plaingpt.inference.pretrained import without_padding

SHAPE = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, bias=False, vocab_size=65)
WHAT = {'iter_num': 5, 'best_val_loss': 2.0, 'config': {'dataset': 'x'}}
ARGS = b'}(X\x05\x00\x00\x00modelNX\x0a\x00\x00\x00model_args'  # a dict up to the value of that key
# Functions that could run code or take all memory, and classes that torch would make.
NAMES = ['os system', 'posix system', 'builtins eval', 'builtins exec', 'builtins getattr',
         'builtins __import__', '__builtin__ eval', 'torch load', 'torch.hub load',
         'torch.serialization load', 'codecs encode', '_codecs encode', 'subprocess Popen',
         'operator attrgetter', 'builtins bytearray', 'torch.storage _load_from_bytes',
         'torch._utils _rebuild_sparse_tensor', 'collections Counter', 'torch.nn Module',
         'runpy _run_code', 'torch.jit load', 'torch._utils _rebuild_tensor_v2.__globals__']


def text(value):
    return b'X' + struct.pack('<I', len(value)) + value.encode()


def doubled(times, name='t'):
    """A value that holds itself twice so often, as operations: tuples, lists or dicts."""
    start, put = {'t': (b')', b''), 'l': (b']', b''), 'd': (b'}', b'')}[name]
    found = start + put + b'q\x00'
    for _ in range(times):
        found += {'t': b'h\x00\x86q\x00', 'l': b'q\x01](h\x01h\x01eq\x00',
                  'd': b'q\x01}(K\x01h\x01K\x02h\x01uq\x00'}[name]
    return found


def calls():
    """(name, pickle) of what names a function, in all ways that pickles have."""
    for name in NAMES:
        module, function = (word.encode() for word in name.split(' '))
        at = b'c' + module + b'\n' + function + b'\n'
        mark = b'(' + text('touch hacked' if 'system' in name else "open('hacked', 'w')")
        yield f'reduce {name}', b'\x80\x02' + at + mark + b'tR.'
        yield f'newobj {name}', b'\x80\x02' + at + mark + b't\x81.'
        yield f'inst {name}', mark + b'i' + module + b'\n' + function + b'\n.'
        yield f'stack {name}', b'\x80\x04' + text(module.decode()) + text(function.decode()) \
            + b'\x93' + mark + b'tR.'
    system = b'cos\nsystem\n'
    yield 'obj', b'(' + system + text('touch hacked') + b'o.'
    yield 'build', b'ccollections\nOrderedDict\n)R' + b'}X\x05\x00\x00\x00items' + system + b'sb.'
    yield 'newobj_ex', b'\x80\x04' + system + b')}\x92.'
    for operation in (b'\x82\x01', b'\x83\x01\x00', b'\x84\x01\x00\x00\x00', b'Pos.system\n',
                      b'K\x01Q', b'\x97', b'\x96' + b'\xff' * 8, b'\x95' + b'\xff' * 8):
        yield f'operation {operation[:2]}', b'\x80\x02' + operation + b'.'


def structures():
    """(name, pickle) of what would take time, memory or stack."""
    dicts, tensor = b'ccollections\nOrderedDict\n', b'ctorch._utils\n_rebuild_tensor_v2\n'
    for kind in 'tld':
        bomb = doubled(60, kind)
        for name, data in (
                ('key', b'}' + bomb + b'K\x01s.'), ('reduce', bomb + b')R.'),
                ('newobj', bomb + b')\x81.'), ('build', dicts + b')R' + bomb + b'b.'),
                ('pairs', dicts + b'](' + bomb + b'K\x01\x86e\x85R.'),
                ('state', dicts + b')R](' + bomb + b'K\x01\x86eb.'),
                ('storage', b'(' + text('storage') + b'ctorch\nFloatStorage\n' + bomb
                 + text('cpu') + b'K\x01tQ.'),
                ('location', b'(' + text('storage') + b'ctorch\nFloatStorage\n' + text('0') + bomb
                 + b'K\x01tQ.'),
                ('persistent', bomb + b'Q.'), ('tensor', tensor + bomb + b'\x85R.'),
                ('size', tensor + b'(NK\x00' + bomb + bomb + b'\x89NtR.'),
                ('torch.Size', b'ctorch\nSize\n' + bomb + b'\x85R.'),
                ('device', b'ctorch\ndevice\n' + bomb + b'\x85R.'),
                ('config', b'c__main__\nGPTConfig\n' + bomb + b'\x85R.'),
                ('model_args', ARGS + bomb + b'u.'),
                ('n_layer', ARGS + b'}' + text('n_layer') + bomb + b'su.'),
                ('n_layer, all else', ARGS + b'}(' + b''.join(
                    text(key) + (bomb if key == 'n_layer' else b'K\x08') for key in SHAPE)
                 + b'uu.'), ('alone', bomb + b'.')):
            yield f'{kind} {name}', b'\x80\x02' + data
    later = b''.join(b']r' + struct.pack('<I', i) for i in range(61)) + b''.join(
        b'j%b(j%bj%be' % (struct.pack('<I', i + 1), *[struct.pack('<I', i)] * 2)
        for i in reversed(range(60)))  # lists that are filled once others hold them
    yield 'filled later', b'\x80\x02' + later + ARGS + b'}' + text('n_layer') + b'j<\0\0\0su.'
    yield 'filled later, called', b'\x80\x02' + later + b'j<\0\0\0)R.'
    yield 'itself', b'\x80\x02}q\x00(K\x01h\x00u.'
    yield 'its own model', b'\x80\x02}q\x00(' + text('model') + b'h\x00' \
        + text('model_args') + b'h\x00u.'
    yield 'list in itself', b'\x80\x02]q\x00h\x00a.'
    for depth in (1000, 39_000, 100_000, 480_000):
        yield f'deep tuples {depth}', b'\x80\x02)' + b'\x85' * depth + b'.'
        yield f'deep key {depth}', b'\x80\x02})' + b'\x85' * depth + b'K\x01s.'
        yield f'deep pair {depth}', b'\x80\x02' + dicts + b'])' + b'\x85' * depth \
            + b'K\x01\x86a\x85R.'
        yield f'deep lists {depth}', b'\x80\x02' + b']' * depth + b'a' * (depth - 1) + b'.'
        yield f'deep n_layer {depth}', b'\x80\x02' + ARGS + b'}' + text('n_layer') \
            + b')' + b'\x85' * depth + b'su.'
        for kind, deep in (('tuples', b')' + b'\x85' * depth),
                           ('lists', b']' * depth + b'a' * (depth - 1))):
            yield f'{kind} {depth} in a tensor', b'\x80\x02' + tensor + deep + b'\x85R.'
            yield f'{kind} {depth} in a call', b'\x80\x02' + deep + b')R.'
        yield f'deep marks {depth}', b'\x80\x02' + b'(' * depth + b't' * depth + b'.'
    for name, data in (
            ('LONG4', b'\x8b\xff\xff\xff\x7f'), ('negative LONG4', b'\x8b\xff\xff\xff\xff'),
            ('LONG1', b'\x8a\xff' + b'\x7f' * 255), ('INT', b'I' + b'9' * 10**6 + b'\n'),
            ('LONG', b'L' + b'9' * 4000 + b'L\n'), ('text', b'X\xff\xff\xff\xffa'),
            ('text of 8 bytes', b'\x8d' + b'\xff' * 8), ('bytes', b'C\xffa'), ('nothing', b''),
            ('memo', b'Kr\xff\xff\xff\xff'), ('a GET of nothing', b'h\x07'), ('a pop', b'0'),
            ('a mark', b'(('), ('FLOAT', b'Fnan\n'), ('a set', b'\x8f(K\x01\x90'),
            ('list as key', b'}]K\x01s'), ('dict as key', b'}}K\x01s'), ('odd', b'}(K\x01u'),
            ('APPEND to a tuple', b')K\x01a'), ('SETITEM of a text', text('a') + b'K\x01K\x01s'),
            ('protocol 255', b'\x80\xff}')):
        yield name, b'\x80\x02' + data + b'.'
    yield 'large keys', pickle.dumps({(2**61 - 1) * i for i in range(1, 8)}, 2)
    yield 'equal keys', pickle.dumps({float(i * 2**61): 1 for i in range(1, 2000)}, 2)


def whole():
    """What a file of nanoGPT holds."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, mlp='gelu_erf'))
    return {'model': {name: w.clone() for name, w in
                      without_padding(model.state_dict(), SHAPE['vocab_size']).items()},
            'model_args': dict(SHAPE), **WHAT}


def spoilt():
    """(name, what is saved) with sizes, keys, weights and types that nanoGPT's has not."""
    for key in SHAPE:
        for value in (2**62, 2**31 - 1, 10**18, 0, -1, 1.5, float('nan'), '1', None, [], {}, (),
                      True, torch.tensor(1)):
            if (key, value) != ('bias', True):
                yield f'{key}={value!r}', whole() | {'model_args': {**SHAPE, key: value}}
    embedding, w = 'transformer.wte.weight', whole()['model']['transformer.wte.weight']
    for name, value in (
            ('stride 0', torch.zeros(1).expand(2**61)), ('a number', torch.tensor(1.0)),
            ('rows', torch.zeros(1, 1).expand(2**40, 8)),
            ('strides', torch.zeros(200).as_strided((65, 8), (1, 1))),
            ('nan', torch.full((65, 8), float('nan'))), ('int', w.long()), ('bool', w > 0),
            ('complex', w.cfloat()), ('float8', w.to(torch.float8_e4m3fn)), ('double', w.double()),
            ('meta', w.to('meta')), ('sparse', w.to_sparse()), ('conj', w.cfloat().conj()),
            ('text', 'w'), ('list', [w]), ('none', None), ('parameter', torch.nn.Parameter(w)),
            ('empty', torch.empty(0, 8)), ('axes', w.reshape(1, 65, 8)), ('turned', w.t()),
            ('many axes', torch.zeros(1).expand([1] * 60)), ('storage', w.untyped_storage()),
            ('bits', w.view(torch.uint16))):
        for where in (embedding, 'lm_head.weight', '\n\x1b[31m', 'transformer.h.-1.x', ''):
            yield f'{where!r} is {name}', whole() | {'model': {**whole()['model'], where: value}}
        args = {'model_args': {**SHAPE, 'vocab_size': 50304}}  # whose rows are cut
        yield f'padding of {name}', whole() | args | {'model': {embedding: value}}
        yield f'loss {name}', whole() | {'best_val_loss': value, 'iter_num': value}
    for key in (None, 1, 1.5, True, 'transformer', 'transformer.h.', 'transformer.h.x.y' * 9999):
        yield f'key {str(key)[:40]}', whole() | {'model': {**whole()['model'], key: w}}
    for key in whole():
        yield f'no {key}', {name: value for name, value in whole().items() if name != key}
        for value in (None, [], 'text', 7, w):
            yield f'{key} is {str(value)[:9]}', whole() | {key: value}
    for value in (None, [], 'model_args', 7, w, {'model_args'}, ('model_args', 'model')):
        yield f'it is {str(value)[:9]}', value


def archive(entries, path, **options):
    with zipfile.ZipFile(path, 'w') as made:
        for name, data in entries:
            made.writestr(name, data, **options)


def saved(value, path, **options):
    torch.save(value, path, **options)
    return path.read_bytes()


def archives(path):
    """(name, bytes): archives that are damaged, or that two readers read differently."""
    data = saved(whole(), path)
    found = {info.filename: zipfile.ZipFile(path).read(info)
             for info in zipfile.ZipFile(path).infolist()}
    root = next(iter(found)).split('/')[0]
    pickled = f'{root}/data.pkl'
    rest = {name: value for name, value in found.items() if name != pickled}
    bomb = b'\x80\x02}' + doubled(60) + b'K\x01s.'

    def made(entries, **options):
        archive(entries, path, **options)
        return path.read_bytes()

    for name in found:
        yield f'no {name}', made([entry for entry in found.items() if entry[0] != name])
        yield f'short {name}', made([(n, v[:len(v) // 2] if n == name else v)
                                     for n, v in found.items()])
    yield 'a bomb', made([*found.items(), (f'{root}/data/9', bytes(10**8))],
                         compress_type=zipfile.ZIP_DEFLATED)
    for name in (f'{root}/DATA.PKL', f'{root}/data.pkl\0', f'{root}//data.pkl', 'x/data.pkl',
                 '../data.pkl', 'data.pkl', f'{root}/data.pkl/'):
        for entries in ([(name, bomb), *found.items()], [*found.items(), (name, bomb)],
                        [*rest.items(), (name, bomb)],
                        [(name, bomb), *rest.items(), (pickled, found[pickled])]):
            yield f'also {name!r} {len(entries)}', made(entries)
    first, second = made([*rest.items(), (pickled, bomb)]), made(found.items())
    yield 'two archives', first + second
    at = struct.unpack('<L', second[-6:-2])[0]  # where the second's directory is said to be
    old = struct.unpack('<L', first[-6:-2])[0]
    size = struct.unpack('<L', second[-10:-6])[0]
    yield 'two directories', first[:old] + first[old:-22].ljust(size, b'\0') + bytes(
        max(0, at - old)) + second[:-6] + struct.pack('<L', old) + b'\0\0'
    yield 'before it', b'#!/bin/sh\n' * 9 + second
    yield 'a comment', second[:-2] + struct.pack('<H', 22) + second[-22:]
    for extra in ('constants.pkl', 'byteorder', '.format_version', '.storage_alignment', 'version'):
        for value in (b'big', b'9' * 5000, b'-1', b'\xff', b''):
            entries = {**found, f'{root}/{extra}': value}
            yield f'{extra} {value[:3]}', made(entries.items())
    rng = random.Random(0)
    for i in range(0, len(data), len(data) // 40):
        yield f'first {i}', data[:i]
    for i in range(60):
        spoilt = bytearray(data)
        for _ in range(1 + i % 5):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        yield f'flipped {i}', bytes(spoilt)
    pickle_at = data.index(found[pickled])
    for i in range(200):
        spoilt = bytearray(data)
        spoilt[pickle_at + rng.randrange(len(found[pickled]))] = rng.randrange(256)
        yield f'pickle flipped {i}', bytes(spoilt)
        spoilt = bytearray(found[pickled])
        spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        yield f'pickle flipped, sums right {i}', made([*rest.items(), (pickled, bytes(spoilt))])


def others(path):
    """(name, bytes) of what is no archive as torch writes it."""
    yield 'legacy', saved(whole(), path, _use_new_zipfile_serialization=False)
    yield 'protocol 4', saved(whole(), path, pickle_protocol=4)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode='w') as tar_file:
        for name in ('sys_info', 'pickle', 'storages', 'tensors'):
            tar_file.addfile(tarfile.TarInfo(name))
    yield 'tar', tar.getvalue()
    yield 'empty', b''
    yield 'zeros', bytes(10**6)
    yield 'PK', b'PK\x03\x04'
    yield 'end of a ZIP', b'PK\x05\x06' + bytes(18)


def cases(folder):
    """Yield (name, function that writes a file) of all, 1,300."""
    for name, data in (*calls(), *structures()):
        yield name, lambda path, data=data: archive(
            [('ckpt/data.pkl', data), ('ckpt/version', '3\n'), ('ckpt/byteorder', 'little')], path)
        yield f'bare {name}', lambda path, data=data: path.write_bytes(data)
    for name, value in spoilt():
        yield name, lambda path, value=value: torch.save(value, path)
    for name, data in (*archives(folder / 'made.pt'), *others(folder / 'made.pt')):
        yield name, lambda path, data=data: path.write_bytes(data)
    yield 'a folder', lambda path: path.mkdir()
    yield 'a FIFO', os.mkfifo
    yield 'a link to itself', lambda path: path.symlink_to(path)
    yield 'a device', lambda path: path.symlink_to('/dev/zero')
