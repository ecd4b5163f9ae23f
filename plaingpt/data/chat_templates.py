"""The chat templates of others, Jinja: is one of them a form that we can write exactly?"""

from plaingpt.data.chat_tokenizer import FORMS, form_of
from plaingpt.data.foreign_tokenizer import TEMPLATE_FILE, parse_object
from plaingpt.data.tokenizers import from_json
from plaingpt.system.streams import warn

USER, ANSWER = {'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}
SYSTEM = {'role': 'system', 'content': 's'}
# Conversations that show what a template does with roles, places and white space.
PROBES = [[USER], [SYSTEM, USER], [USER, ANSWER], [SYSTEM, USER, ANSWER, USER],
          [USER, ANSWER, USER, ANSWER],
          [{'role': 'user', 'content': '\n x {{ y }} \n'}, {'role': 'assistant', 'content': ' z\n'},
           {'role': 'user', 'content': ' <b> "\'\\ é'}]]


def as_chat(description, where):
    """The description of a ForeignTokenizer → that of its chat tokenizer, where its files have a
    chat template, else itself. A template that none of FORMS is exactly gives way to that of the
    plain form of its control tokens, and a line says so."""
    tokenizer = from_json(description)  # which sees that it is whole
    template = find_template(description['files'])
    if template is None:
        return description
    name = form_of(tokenizer)
    if name == 'plaingpt':
        warn(f'{where}: its chat template is of a form that is not known here, so it is read as a '
             'model of text')
        return description
    system = find_system(FORMS[name], template, description)
    if system is None:
        warn(f'{where}: its chat template does more than {name}: conversations are written in '
             f'plain {name}')
        files = {**description['files'], TEMPLATE_FILE: FORMS[name].template}
        description = {**description, 'files': files}
    return {'kind': 'chat', 'base': description, 'form': name, 'system': system or ''}


def find_template(files):
    """{name: text of a file} → the chat template, or None. Of several it is the 'default' one."""
    found = parse_object(files, 'tokenizer_config.json').get('chat_template')
    if isinstance(found, list):
        found = next((each.get('template') for each in found
                      if isinstance(each, dict) and each.get('name') == 'default'), None)
    return files.get(TEMPLATE_FILE, found if isinstance(found, str) else None)


def find_system(form, template, description):
    """What a template lets the system say where a conversation has no such message, '' for nothing;
    None where it writes something else than the form."""
    try:
        texts = render(template, description, PROBES)
        before = form.begin + form.header.format(role='system')
        system = texts[0][len(before):].partition(form.end)[0] \
            if texts[0].startswith(before) else ''
        told = [{'role': 'system', 'content': system}] * bool(system)
        wanted = render(form.template, description, [
            messages if messages[0]['role'] == 'system' else told + messages
            for messages in PROBES])
    except Exception:  # a template can raise anything
        return None
    return system if texts == wanted else None


def render(template, description, conversations):
    """→ the texts that a template writes of conversations, each with and without the beginning of
    an answer. As transformers does it: in a sandbox, where a template reaches nothing of Python.
    Raises ValueError and others."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # torch brings it
    names = parse_object(description['files'], 'tokenizer_config.json')
    special = {key: value['content'] if isinstance(value, dict) else value
               for key, value in names.items() if key in ('bos_token', 'eos_token', 'pad_token')}

    def fail(message):
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals['raise_exception'] = fail
    compiled = environment.from_string(template)
    return [compiled.render(messages=messages, tools=None, documents=None,
                            add_generation_prompt=prompting, **special)
            for messages in conversations for prompting in (False, True)]
