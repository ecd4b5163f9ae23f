"""Chat templates as their authors publish them, with small tokenizers that have their tokens."""

import json
from typing import NamedTuple

ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('roles must alternate') }}{% endif %}")
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
DEFAULT_SYSTEM = ("{% if messages[0]['role'] != 'system' %}"
                  "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML)
GENERATION = ("{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
              "{%- if message['role'] == 'assistant' -%}{%- generation -%}"
              "{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{%- else -%}"
              "{{- message['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\n' -}}{%- endfor -%}"
              "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}")
LLAMA3 = ("{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
          "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | "
          "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
          "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
MISTRAL = ("{{ bos_token }}{% for message in messages %}" + ALTERNATE +
           "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
           "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}")
NEMO = MISTRAL.replace("[INST] '", "[INST]'").replace("' [/", "'[/").replace("' ' + m", "m")
# The system message becomes part of the last user message, as in Mistral 7B v0.3.
MERGING = ("{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
           "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}"
           "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
           "{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}"
           "{{ message['content'] + '[/INST]' }}{% else %}{{ message['content'] + eos_token }}"
           "{% endif %}{% endfor %}")
LLAMA2 = ("{% for message in messages %}{% if message['role'] == 'user' %}"
          "{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}{% else %}"
          "{{ ' '  + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}")
GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
         "{{ raise_exception('System role not supported') }}{% endif %}"
         "{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}"
         "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
         "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
         "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}")
PHI3 = ("{% for message in messages %}{{'<|' + message['role'] + '|>\n' + message['content'] + "
        "'<|end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}")
PHI4 = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '<|im_sep|>' + "
        "message['content'] + '<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}")
ZEPHYR = ("{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
          "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
          "{% elif message['role'] == 'system' %}\n"
          "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
          "{% elif message['role'] == 'assistant' %}\n"
          "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
          "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
          "{% endfor %}")


class Form(NamedTuple):
    """A template, and the text that it gives: opening, then for each turn user and reply."""

    template: str
    bos: str | None
    eos: str | None
    controls: list
    user: str  # up to where the reply begins
    reply: str  # with the token that ends it
    opening: str = ''
    gap: str = ''  # between a reply and the next turn


IM = ['<|im_start|>', '<|im_end|>']
IN_CHATML = '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n', '{}<|im_end|>'
PHI_TURNS = '<|user|>\n{}<|end|>\n<|assistant|>\n', '{}<|end|>', '', '\n'
FORMS = {
    'chatml': Form(CHATML, None, '<|endoftext|>', ['<|endoftext|>', *IM], *IN_CHATML, '', '\n'),
    'chatml, BOS im_start': Form(CHATML, *IM, IM, *IN_CHATML, '', '\n'),
    'chatml, no BOS': Form(CHATML, None, IM[1], IM, *IN_CHATML, '', '\n'),
    'chatml, nothing declared': Form(CHATML, None, None, IM, *IN_CHATML, '', '\n'),
    'chatml, BOS im_end': Form(CHATML, IM[1], IM[1], IM, *IN_CHATML, '', '\n'),
    'chatml, other BOS': Form(CHATML, '<s>', '</s>', ['<s>', '</s>', *IM], *IN_CHATML, '', '\n'),
    'chatml after BOS': Form('{{ bos_token }}' + CHATML, '<s>', IM[1], ['<s>', *IM], *IN_CHATML,
                             '<s>', '\n'),
    'chatml after no BOS': Form('{{ bos_token }}' + CHATML, None, IM[1], IM, *IN_CHATML, '', '\n'),
    'default system': Form(DEFAULT_SYSTEM, *IM, IM, *IN_CHATML,
                           '<|im_start|>system\nYou help.<|im_end|>\n', '\n'),
    'generation': Form(GENERATION, *IM, IM, *IN_CHATML, '', '\n'),
    'llama3': Form(LLAMA3, '<|begin_of_text|>', '<|eot_id|>', [
        '<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'],
        '<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>'
        '<|start_header_id|>assistant<|end_header_id|>\n\n', '{}<|eot_id|>', '<|begin_of_text|>'),
    'mistral': Form(MISTRAL, '<s>', '</s>', ['<s>', '</s>'], '[INST] {} [/INST]', ' {}</s>', '<s>'),
    'nemo': Form(NEMO, '<s>', '</s>', ['<s>', '</s>', '[INST]', '[/INST]'], '[INST]{}[/INST]',
                 '{}</s>', '<s>'),
    'merging': Form(MERGING, '<s>', '</s>', ['<s>', '</s>', '[INST]', '[/INST]'],
                    '[INST]{}[/INST]', '{}</s>', '<s>'),
    'llama2': Form(LLAMA2, '<s>', '</s>', ['<s>', '</s>'], '<s>[INST] {} [/INST]', ' {} </s>'),
    'gemma': Form(GEMMA, '<bos>', '<eos>', ['<bos>', '<eos>', '<start_of_turn>', '<end_of_turn>'],
                  '<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n',
                  '{}<end_of_turn>', '<bos>', '\n'),
    'phi3': Form(PHI3, '<s>', '<|endoftext|>', [
        '<s>', '<|endoftext|>', '<|user|>', '<|assistant|>', '<|end|>'], *PHI_TURNS),
    'phi3, default system': Form(
        "{% if messages[0]['role'] != 'system' %}{{ '<|system|>\nYou help.<|end|>\n' }}{% endif %}"
        + PHI3, None, '<|end|>', ['<|system|>', '<|user|>', '<|assistant|>', '<|end|>'],
        *PHI_TURNS[:2], '<|system|>\nYou help.<|end|>\n', '\n'),
    'phi4': Form(PHI4, '<|endoftext|>', IM[1], ['<|endoftext|>', '<|im_sep|>', *IM],
                 '<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>',
                 '{}<|im_end|>'),
    'zephyr': Form(ZEPHYR, '<s>', '</s>', ['<s>', '</s>'],
                   '<|user|>\n{}</s>\n<|assistant|>\n', '{}</s>', '', '\n')}


def prompts_and_replies(form, messages):
    """A conversation without a system message → [(text before a reply, the reply with its end)]"""
    pairs, text = [], form.opening
    for question, answer in zip(messages[::2], messages[1::2], strict=True):
        text += form.user.format(question['content'].strip())
        reply = form.reply.format(answer['content'].strip())
        pairs.append((text, reply))
        text += reply + form.gap
    return pairs


def save_form(folder, form):
    """Write a tokenizer of bytes with the control tokens and the template of a Form."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in form.controls])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(
        {'bos_token': form.bos, 'eos_token': form.eos, 'chat_template': form.template}))
    return folder
