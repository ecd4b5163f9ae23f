"""Small models and tokenizers as others publish them: made here, by the packages that they use."""

import json
from pathlib import Path

import torch

from model import GPT, GPTConfig
from plaingpt.data.tokenizers import GPT2Tokenizer
from plaingpt.inference.hf_export import hf_tokenizer
from plaingpt.inference.pretrained import open_pretrained


def opened(source):
    """Weights of others → a GPT of ours."""
    found = open_pretrained(source)
    model = GPT(found.config).eval()
    found.load_into(model)
    return model


def in_transformers(folder):
    """A folder that was exported → its model in transformers, with its own code or without."""
    from transformers import AutoModelForCausalLM
    own_code = (Path(folder) / 'remote_code.py').exists()
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=own_code).eval()


def shaken(vocab_size=257, n_layer=2, n_head=4, n_embd=48, std=0.2, block_size=256, GPT=GPT,
           GPTConfig=GPTConfig, **flags):
    """A small model of ours in which every parameter matters."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, **flags)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * std)
    return model


def nanogpt_checkpoint(path, model, prefix='', vocab_size=None, **more):
    """What nanoGPT's train.py saves: the tied matrix twice, padded as it pads."""
    c = model.config
    weights = {prefix + name: w.clone() for name, w in model.state_dict().items()}
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        weights[prefix + name] = weights[prefix + name][:vocab_size or c.vocab_size].clone()
    torch.save({'model': weights, 'optimizer': {'state': {0: {'step': torch.tensor(1.0)}}},
                'model_args': dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
                                   block_size=c.block_size, bias=c.bias, dropout=0.1,
                                   vocab_size=vocab_size or c.vocab_size),
                'iter_num': 5, 'best_val_loss': torch.tensor(2.0), 'config': {'dataset': 'x'},
                **more}, path)


def tokens(vocab_size, *shape):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


STRANGE = [  # texts
    'Hello, wörld!  Grüße, ÀÈÌ\n\n\t 12345 ', '日本語のテキスト、中文。', '🎉🎉\r\n👩‍👧‍👦 🇩🇪',
    '    ', 'a    b\n\n\nc', ' ', '\n', '', 'aaaaaaaaaaa' * 3, "it's we'll I'd 'S WE'LL 1234567",
    '\x00\x7f\xad¡', 'e\u0301 \u200b\u3000\xa0x \u2028\u2029\x85\x1c', 'Ⅷ ₂³½ ٣',
    'def f(x):\n    return  x\n\n  ']
CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
          "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")  # SmolLM2-360M-Instruct
LLAMA3 = ("{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
          "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | "
          "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
          "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
THINKING = CHATML.replace("{{'<|im_start|>' + message['role'] + '\n' +",
                          "{{'<|im_start|>' + message['role'] + '\n' + '<think>\n\n</think>\n\n' * "
                          "(message.role == 'assistant') +")
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" \
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = {  # control tokens, template, names of tokens
    'smollm2': (['<|endoftext|>', '<|im_start|>', '<|im_end|>'], CHATML,
                {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>'}),
    'llama3': (['<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>', '<|end_header_id|>',
                '<|eot_id|>'], LLAMA3,
               {'bos_token': '<|begin_of_text|>', 'eos_token': '<|eot_id|>'}),
    'qwen': (['<|endoftext|>', '<|im_start|>', '<|im_end|>'], THINKING,
             {'bos_token': None, 'eos_token': {
                 '__type': 'AddedToken', 'content': '<|im_end|>', 'lstrip': False, 'rstrip': False,
                 'normalized': False, 'single_word': False, 'special': True}})}


def save_tokenizer(folder, kind, texts, vocab_size=400, template=True):
    """Train a byte-level BPE as a family has it, and write its files → the Tokenizer."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    controls, jinja, names = KINDS[kind]
    made = Tokenizer(models.BPE(ignore_merges=kind == 'llama3'))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == 'smollm2')
    first = pre_tokenizers.Digits(individual_digits=True) if kind == 'smollm2' else \
        pre_tokenizers.Split(Regex(SPLIT % (r'\p{N}{1,3}' if kind == 'llama3' else r'\p{N}')),
                             'isolated')
    made.pre_tokenizer = pre_tokenizers.Sequence([first, by_bytes])
    made.decoder = decoders.ByteLevel()
    if kind == 'qwen':
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(controls) - (kind == 'qwen'), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=controls if kind == 'smollm2' else [])
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in controls])
    if kind == 'qwen':
        made.add_tokens([AddedToken('<think>', special=False, normalized=False)])
    if kind == 'llama3':
        made.post_processor = processors.TemplateProcessing(
            single='<|begin_of_text|> $A', special_tokens=[
                ('<|begin_of_text|>', made.token_to_id('<|begin_of_text|>'))])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / 'tokenizer.json'))
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': 64,
              'clean_up_tokenization_spaces': False, **names,
              **({'chat_template': jinja} if template else {})}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config, indent=2))
    return made


def save_model(folder, kind, vocab_size=512, scale=0.02, **sizes):
    """A model of the family of a tokenizer, grouped and with more rows than tokens, saved."""
    import transformers
    family = {'smollm2': 'Llama', 'llama3': 'Llama', 'qwen': 'Qwen3'}[kind]
    torch.manual_seed(0)
    scaled = {'rope_type': 'llama3', 'rope_theta': 500000.0, 'factor': 8.0, 'low_freq_factor': 1.0,
              'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
    more = {'rope_parameters': scaled} if kind == 'llama3' else {}
    config = getattr(transformers, f'{family}Config')(**{
        'vocab_size': vocab_size, 'hidden_size': 48, 'intermediate_size': 128,
        'num_hidden_layers': 2, 'num_attention_heads': 6, 'num_key_value_heads': 2, 'head_dim': 8,
        'max_position_embeddings': 128, 'tie_word_embeddings': True, 'initializer_range': scale,
        'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None, **more, **sizes})
    model = getattr(transformers, f'{family}ForCausalLM')(config)
    model.save_pretrained(folder)
    return model


def save_gpt2(folder, **sizes):
    """A model as OpenAI's are on the hub, with random weights, saved → the GPT2LMHeadModel. One of
    GPT-2's vocab_size has its tokenizer."""
    import transformers
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    model.save_pretrained(folder)
    if model.config.vocab_size == GPT2Tokenizer.vocab_size:
        (folder / 'tokenizer.json').write_text(
            json.dumps(hf_tokenizer(GPT2Tokenizer()), ensure_ascii=False), encoding='utf-8')
        (folder / 'tokenizer_config.json').write_text('{"model_max_length": 1024}')
    return model
