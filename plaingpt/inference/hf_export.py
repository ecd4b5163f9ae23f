"""Export to the Hugging Face layout, for transformers and for pretrained.py: weights, config.json
and tokenizer.json."""

import inspect
import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from plaingpt.data.chat_tokenizer import SPECIAL_TOKENS, TEMPLATE
from plaingpt.data.foreign_tokenizer import (
    OUR_TOKENIZER,
    PRINTABLE,
    TEMPLATE_FILE,
    ForeignTokenizer,
    added_token,
)
from plaingpt.data.tokenizers import GPT2_PATTERN, PATTERN, is_chat
from plaingpt.inference.generation import cached_logits, check_cache, relative_error
from plaingpt.inference.hf_architectures import OWN_CODE, READABLE, choose_architecture
from plaingpt.system.errors import UserError
from plaingpt.system.formatting import one_line

MAX_TOKENS = 8192  # in the longest sequence that is compared
GENERATED_TOKENS = 30  # the last ones of it, which transformers generates
CHECK_TOLERANCE = 1e-4  # relative error; rounding gives 1e-6, and the other GELU 2e-4

END_OF_TEXT, PADDING = '<|endoftext|>', '<|padding|>'


def write_hf(folder, model, tokenizer, dtype=torch.float32, model_type=None):
    """Write the weights, config.json and tokenizer into `folder`, a Path, and the code of a model
    that transformers has no class for → the name of the architecture, which model_type can set.
    Raises UserError."""
    model_type = model_type or choose_architecture(model)
    architecture = READABLE[model_type]
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    hf_weights = architecture.write_weights(weights, model.config)
    hf_weights = {name: w.to(dtype).contiguous() for name, w in hf_weights.items()}
    save_file(hf_weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    bos_id, eos_id = bos_and_eos(tokenizer)
    files = {'config.json': {
        'model_type': model_type, **architecture.write_config(model.config),
        'dtype': str(dtype).removeprefix('torch.'), 'bos_token_id': bos_id,
        'eos_token_id': eos_id}}
    if model_type == OWN_CODE:
        check_cache(model, MAX_TOKENS)  # remote_code.py always uses a cache
        files['model.py'] = Path(inspect.getfile(type(model))).read_text(encoding='utf-8')
        code = Path(__file__).with_name('remote_code.py').read_text(encoding='utf-8')
        files['remote_code.py'] = code.replace('from model import', 'from .model import')
    write_files(folder, files | tokenizer_files(tokenizer, model.config.block_size))
    return model_type


def write_files(folder, files):
    """Write {name: text or the content of a JSON file} into a folder."""
    for name, content in files.items():
        if not isinstance(content, str):
            content = json.dumps(content, indent=1) + '\n'
        (folder / name).write_text(content, encoding='utf-8', newline='')


@torch.no_grad()
def check_export(folder, model, dtype=torch.float32, text=(), insisted=False):
    """Let transformers open what write_hf() wrote → the relative error of its logits, or None
    without transformers 5. The weights of `model` are rounded to `dtype` for this.

    They are compared over the whole context length: a prompt (see export_prompt), and what
    transformers generates from it, greedily and with its KV cache. Our cache must give the same.
    insisted: model.py may be edited; compare each token of the vocabulary too"""
    try:
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig
    except ImportError:
        return None
    if int(transformers.__version__.split('.')[0]) < 5:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    T = min(model.config.block_size, MAX_TOKENS)
    prompt = export_prompt(text, model.config.vocab_size, T)  # (1, T + 1 - n)
    n = T + 1 - prompt.size(1)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True,
            trust_remote_code=(folder / 'remote_code.py').exists())  # which we just wrote
        theirs.generation_config = GenerationConfig()  # no stop tokens, no penalties
        generated = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False,
            output_logits=True, return_dict_in_generate=True)
    except Exception as e:  # transformers raises many kinds of errors
        raise UserError(f'transformers {transformers.__version__} cannot use this export '
                        f'({type(e).__name__}: {one_line(e)[:200]}); nothing was written; install '
                        'another version, such as transformers==5.24.0') from None
    for p in model.parameters():
        p.copy_(p.to(dtype))
    model.config.document_attention = False  # transformers gets one document
    idx = generated.sequences[:, :-1]  # (1, T)
    expected = model(idx)[0]  # (1, T, V)
    error = max(relative_error(theirs(idx).logits, expected),
                relative_error(torch.cat(generated.logits), expected[0, -n:]),
                relative_error(cached_logits(model, idx, T + 1 - n), expected))
    if insisted:
        for ids in torch.arange(model.config.vocab_size)[None].split(T, dim=1):  # each (1, T)
            error = max(error, relative_error(theirs(ids).logits, model(ids)[0]))
    return error


def export_prompt(text, vocab_size, T):
    """The start of `text`, token ids, and repeated tokens if it is too short → a prompt (1, T + 1 -
    GENERATED_TOKENS), which together with generated tokens fills a context of T tokens."""
    length = T + 1 - min(GENERATED_TOKENS, T)
    generator = torch.Generator().manual_seed(0)
    some_tokens = torch.randint(vocab_size, (32,), generator=generator)
    prompt = some_tokens[torch.randint(32, (length,), generator=generator)]
    text = torch.tensor(text[:length], dtype=torch.long)
    return torch.cat((text, prompt[len(text):]))[None]


def tokenizer_files(tokenizer, block_size):
    """→ {file name: its content}. The files of a pretrained tokenizer are copied unchanged, except
    that a chat tokenizer adds its template and end-of-turn tokens."""
    base = getattr(tokenizer, 'base', tokenizer)
    if base.to_json()['kind'] in ('ids', 'words'):  # tokenizer.json cannot describe these
        return {OUR_TOKENIZER: tokenizer.to_json()}
    bos_id, eos_id = bos_and_eos(tokenizer)
    is_pretrained = isinstance(base, ForeignTokenizer)
    if is_pretrained:
        files = dict(base.to_json()['files'])
        if is_chat(tokenizer) and tokenizer.has_own_template():
            tokenizer_json = json.loads(files['tokenizer.json'])
            for name, i in tokenizer.ids.items():
                tokenizer_json['added_tokens'].append(added_token(i, name))
            tokenizer_json['model']['vocab'] |= tokenizer.ids
            files['tokenizer.json'] = tokenizer_json
            files[OUR_TOKENIZER] = tokenizer.to_json()
    else:
        tokenizer_json = hf_tokenizer(tokenizer)
        special = {token['id']: token['content'] for token in tokenizer_json['added_tokens']}
        files = {'tokenizer.json': tokenizer_json, OUR_TOKENIZER: tokenizer.to_json(),
                 'tokenizer_config.json': {
                     'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': block_size,
                     'bos_token': special.get(bos_id), 'eos_token': special.get(eos_id),
                     'clean_up_tokenization_spaces': False}}
    if is_chat(tokenizer):
        files[TEMPLATE_FILE] = tokenizer.template or TEMPLATE
    if is_chat(tokenizer) or not is_pretrained:  # stop at the same tokens as plainGPT
        generation_config = json.loads(files.get('generation_config.json', '{"do_sample": true}'))
        generation_config['eos_token_id'] = sorted(tokenizer.stop_ids) or None
        files['generation_config.json'] = generation_config
    return files


def bos_and_eos(tokenizer):
    """→ (the id that starts a text, the id that ends it); None if there is none."""
    bos_id = tokenizer.end_of_text
    if is_chat(tokenizer):
        return bos_id, tokenizer.end_of_turn
    return bos_id, min(tokenizer.stop_ids - {bos_id}, default=bos_id)


# -----------------------------------------------------------------------------
# tokenizer.json


def hf_tokenizer(tokenizer):
    """The content of tokenizer.json, the format of Hugging Face's tokenizers library."""
    base = tokenizer.base if is_chat(tokenizer) else tokenizer
    kind = base.to_json()['kind']
    end_of_text = base.end_of_text
    special = {} if end_of_text is None else {END_OF_TEXT: end_of_text}
    merges = []
    if kind == 'char':
        vocab = {char: i for i, char in enumerate(base.tokens)}
        pre_tokenizer, decoder = None, {'type': 'Fuse'}
    else:
        tokens = [base.decode_bytes([i]) for i in range(end_of_text)]
        vocab = {as_printable(token): i for i, token in enumerate(tokens)}
        merges = [f'{as_printable(a)} {as_printable(b)}' for a, b in find_merges(tokens)]
        pattern = None if kind == 'byte' else base.pattern
        pre_tokenizer = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
                         'use_regex': pattern == GPT2_PATTERN}
        decoder = {**pre_tokenizer, 'add_prefix_space': True, 'use_regex': True}
        if pattern == PATTERN:
            split = {'type': 'Split', 'pattern': {'Regex': PATTERN}, 'behavior': 'Isolated',
                     'invert': False}
            pre_tokenizer = {'type': 'Sequence', 'pretokenizers': [split, pre_tokenizer]}
        if kind == 'bpe':
            special[PADDING] = end_of_text + 1
    if is_chat(tokenizer):
        special |= {name: base.vocab_size + i for i, name in enumerate(SPECIAL_TOKENS)}
    return {
        'version': '1.0', 'pre_tokenizer': pre_tokenizer, 'decoder': decoder,
        'added_tokens': [added_token(i, text) for text, i in special.items()],
        'model': {'type': 'BPE', 'vocab': vocab | special, 'merges': merges,
                  'ignore_merges': kind in ('gpt2', 'bpe')},  # like tiktoken: whole tokens first
    }


def find_merges(tokens):
    """The tokens of a BPE as bytes, in order of rank → the pair that each was merged from."""
    ranks = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        pieces = [token[j:j + 1] for j in range(len(token))]
        while len(pieces) > 2:
            pair_ranks = [ranks.get(a + b, i) for a, b in pairwise(pieces)]
            if min(pair_ranks) == i:
                break
            at = pair_ranks.index(min(pair_ranks))
            pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
        if len(pieces) == 2:
            merges.append(pieces)
    return merges


def as_printable(token):
    """Bytes as the printable characters of GPT-2's vocabulary, in which a space is 'Ġ'."""
    return ''.join(PRINTABLE[byte] for byte in token)
