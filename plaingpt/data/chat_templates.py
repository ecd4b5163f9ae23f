"""The chat templates of others, Jinja: is one of them a form that we can write exactly?"""

import json
import subprocess
import sys

from plaingpt.data import template_process
from plaingpt.data.chat_tokenizer import FORMS, form_of
from plaingpt.data.tokenizers import from_json
from plaingpt.system.files import parse_json
from plaingpt.system.streams import warn

MAX_TEMPLATE = 2**17  # characters
MAX_WAIT = 30  # seconds, for a process that takes a tenth of one
USER, ANSWER = {'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}
SYSTEM = {'role': 'system', 'content': 's'}
# Conversations that show what a template does with roles, places and white space.
PROBES = [[USER], [SYSTEM, USER], [USER, ANSWER], [SYSTEM, USER, ANSWER, USER],
          [USER, ANSWER, USER, ANSWER],
          [{'role': 'user', 'content': '\n x {{ y }} \n'}, {'role': 'assistant', 'content': ' z\n'},
           {'role': 'user', 'content': ' <b> "\'\\ é'}]]


def as_chat(description, where):
    """The description of a ForeignTokenizer → that of its chat tokenizer, where its files have a
    chat template, else itself. A template that none of FORMS is exactly gives way to the plain form
    of its control tokens, and a line says so."""
    tokenizer = from_json(description)  # which sees that it is whole
    template = find_template(description['files'])
    if template is None:
        return description
    form = form_of(tokenizer)
    system = None if form == 'plaingpt' else find_system(FORMS[form], template, description)
    if system is None and form == 'plaingpt':
        warn(f'{where}: its chat template is of a form that is not known here, so it is read as a '
             'model of text')
        return description
    if system is None:
        warn(f'{where}: its chat template does more than {form}: conversations are written in '
             f'plain {form}')
    return {'kind': 'chat', 'base': description, 'form': form, 'system': system or ''}


def find_template(files):
    """{name: text of a file} → the chat template, or None. Of several it is the 'default' one."""
    if 'chat_template.jinja' in files:
        return files['chat_template.jinja']
    found = parse_json(files.get('tokenizer_config.json', '{}')).get('chat_template')
    if isinstance(found, list):
        found = next((each.get('template') for each in found
                      if isinstance(each, dict) and each.get('name') == 'default'), None)
    return found if isinstance(found, str) else None


def is_exact(tokenizer):
    """Whether the template in the files of a chat tokenizer of others writes its form."""
    description = tokenizer.base.to_json()
    template = find_template(description['files'])
    return template is not None and \
        find_system(tokenizer.form, template, description) == tokenizer.system


def find_system(form, template, description):
    """What a template lets the system say where a conversation has no such message, '' for nothing;
    None where it writes something else than the form."""
    asked = [(messages, prompting) for messages in PROBES for prompting in (False, True)]
    try:
        texts = render(template, description, asked)
    except Exception:  # a template can raise anything
        return None
    alone, before = texts[0], form.begin + form.header.format(role='system')
    system = alone[len(before):].partition(form.end)[0] \
        if alone.startswith(before) and form.end in alone else ''
    wanted = [written(form, system, messages, prompting) for messages, prompting in asked]
    return system if texts == wanted else None


def written(form, system, messages, prompting):
    """Messages in a form, as a text; with prompting up to where the assistant answers."""
    if system and messages[0]['role'] != 'system':
        messages = [{'role': 'system', 'content': system}, *messages]
    texts = [message['content'].strip() if form.trims else message['content']
             for message in messages]
    return form.begin + ''.join(
        form.header.format(role=message['role']) + text + form.end + form.after
        for message, text in zip(messages, texts, strict=True)) \
        + form.header.format(role='assistant') * prompting


def render(template, description, asked):
    """[(messages, whether an answer is to come), …] → the texts that a template writes, in a
    process of its own, which cannot take much time or memory. Raises ValueError and others."""
    if len(template) > MAX_TEMPLATE:
        raise ValueError('it is too long')
    names = parse_json(description['files'].get('tokenizer_config.json', '{}'))
    special = {key: value['content'] if isinstance(value, dict) else value
               for key, value in names.items() if key in ('bos_token', 'eos_token', 'pad_token')}
    given = json.dumps({'template': template, 'names': special, 'asked': asked})
    done = subprocess.run([sys.executable, '-P', template_process.__file__], input=given.encode(),
                          capture_output=True, timeout=MAX_WAIT, check=True)
    return json.loads(done.stdout)
