"""Chat templates: the same text as transformers gives, and an end to whatever a stranger's template does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.chat_template import MAX_STEPS, ChatTemplate
from headrace.errors import ModelFolderError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Grüße, 2 < 3?  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes: 'naïve' \"✓\""},
    {"role": "user", "content": "Why?"},
]
CALLS = [
    *TALK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"function": {"name": "weather", "arguments": {"place": "Paris, France", "days": [1, 2.5]}}}
        ],
    },
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "tool", "content": '{"t": 22}'},
    {"role": "user", "content": "Thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says how warm it is.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "array"}},
                "required": ["place"],
            },
        },
    }
]
# As those of Llama 3: headers around trimmed contents, tools as indented JSON, a list of roles.
HEADERS = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Tools:\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role in ('ipython', 'tool') or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
# As those of Qwen 3: a namespace that looks for the last question, thoughts that are split off, grouped answers.
THOUGHTS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
# What else the sandbox lets through, once each.
ODDS = """{%- macro quoted(text, sign='"') %}{{ sign ~ text ~ sign }}{{ caller() if caller }}{% endmacro %}
{{ quoted('a', sign="'") }}{% call quoted('b') %}c{% endcall %}
{% set captured %}{% filter upper %}x{{ messages|length }}{% endfilter %}{% endset %}{{ captured }}
{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ ('a,b' .split(',') + ['c'])|join('-') }} {{ 'x' * 3 }} {{ [1, 2] * 2 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }}
{{ '%s is %05.1f%%' % ('it', 2.25) }} {{ '{0:>5}|{name}'.format('r', name='n') }} {{ "%d"|format(3) }}
{{ 'aXbX'|replace('X', 'yy') }} {{ 'aXbX'.replace('X', '', 1) }} {{ 'l\\nm'|indent(2) }} {{ 'c'|center(5) }}|
{{ {'b': 1, 'a': [1, {'z': none}]}|tojson(indent=2, sort_keys=true) }} {{ {'a': 1}.items()|list }} {{ 3 in [1, 3] }}
{% for role, group in messages|groupby('role') %}{{ role }}{{ group|length }}{% if loop.index == 2 %}{% break %}
{% endif %}{% endfor %}{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}
{% for x in range(9) if x is even %}{{ loop.cycle('a', 'b') }}{{ x }}
{{ ',' if not loop.last }}{% else %}no{% endfor %}
{{ [3, 1, 2]|sort|reverse|list }} {{ [1, 2, 3]|sum }} {{ '<b>'|e }} {{ '<i>'|safe }} {{ [1, 2, 3]|batch(2)|list }}
{{ undefined_name|default('d') }} {{ messages[0].get('content') }} {{ messages[-1]['content'][:2] }}
{{ 'é'|urlencode }}
{{ 1 < 2 <= 2 }} {{ 'a' ~ 1 ~ none ~ [1] }} {{ ('a', 1) == ('a', 1) }} {{ {'k': 'v'}['k'] }}
{{ not 1 }} {{ -3|abs }}
"""


@pytest.mark.parametrize("source", [HEADERS, THOUGHTS, ODDS], ids=["headers", "thoughts", "odds"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", [TALK[1:2], TALK, CALLS], ids=["one", "talk", "calls"])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_template_renders_as_with_transformers(source, tools, messages, prompt):
    variables = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"}
    [wanted], _ = render_jinja_template([messages], tools=tools, chat_template=source, **variables)
    assert ChatTemplate(source, "f").render(messages, tools=tools, **variables) == wanted
    assert len(wanted) > 40


LONG = "{% set s = 'a' * 500000 %}{% for i in range(99999) %}"
NESTS = "{% set ns = namespace(x=1, y=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='ab', l=[1]) %}{% for i in range(60) %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "conditions": "{% for a in range(99999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "long bodies": "{% for a in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
    "many expressions": "{% for a in range(99999) %}" + "{{ '' }}" * 1500 + "{% endfor %}",
    "texts doubled": DOUBLES + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "texts joined": DOUBLES + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "lists doubled": DOUBLES + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "blocks doubled": DOUBLES + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "nested lists written": NESTS + "{% endfor %}{{ ns.x }}",
    "nested lists as JSON": NESTS + "{% endfor %}{{ ns.x | tojson }}",
    "nested lists compared": NESTS + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "nested tuples as keys": TUPLES + "{{ {ns.x: 1} | length }}",
    "nested tuples looked up": TUPLES + "{{ {}[ns.x] }}{{ {}.get(ns.x) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "texts times": "{{ 'a' * 10**10 }}",
    "lists times": "{{ [1] * 10**10 }}",
    "joined": "{{ ('a' * 99999).join(['b'] * 9999) }}",
    "joined by a filter": "{{ range(99999) | join('a' * 99999) }}",
    "replaced": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replaced by a filter": "{{ ('a' * 99999) | replace('', 'b' * 99999) }}",
    "looked for": LONG + "{% if 'b' in s %}{% endif %}{% endfor %}",
    "compared": "{% set t = 'a' * 500000 %}" + LONG + "{% if s == t %}{% endif %}{% endfor %}",
    "cut": LONG + "{% set t = s[1:] %}{% endfor %}",
    "counted": "{% set l = ['a' * 1000] * 99 %}{% for i in range(99999) %}{{ l.count('b') }}{% endfor %}",
    "spread": "{% macro m() %}{{ varargs | length }}{% endmacro %}{% set r = range(9999) %}"
    "{% for i in range(99999) %}{{ m(*r) }}{% endfor %}",
    "sums of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "specifiers": "{{ ('%s' * 9999) % (['a' * 999] * 9999) }}",
    "fields": "{{ ('{0}' * 9999).format('a' * 9999) }}",
    "indented": "{{ ('\n' * 99999) | indent(4000) }}",
    "indented JSON": "{{ ([[[[1]]]] * 9999) | tojson(indent=4000) }}",
}
REFUSED = {
    "powers": ("{{ 10 ** (10**9) }}", "at most 4096 bits"),
    "products": (
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "bits",
    ),
    "a wide number": ("{{ '%1000000000d' % 1 }}", "at most four digits"),
    "a width from outside": ("{{ '%*d' % (10**9, 1) }}", "at most four digits"),
    "a wide format": ("{{ '{:1000000000}'.format(1) }}", "at most four digits"),
    "a precise filter": ("{{ '%.1000000000f' | format(1.0) }}", "at most four digits"),
    "padding": ("{{ 'a'.zfill(10**9) }}", "at most 4096"),
    "a wide centre": ("{{ 'a' | center(10**9) }}", "at most 4096"),
    "batches": ("{{ [1] | batch(10**9, 1) | list }}", "at most 4096"),
    "slices": ("{{ [1] | slice(10**9) | list }}", "at most 4096"),
    "rounding": ("{{ 2.5 | round(10**9) }}", "at most 4096"),
    "bytes of a number": ("{{ (1).to_bytes(10**10, 'big') }}", "int.to_bytes is not there"),
    "tabs": ("{{ '\t'.expandtabs(10**10) }}", "str.expandtabs is not there"),
    "tables": ("{{ 'a'.translate({97: 'b' * 99}) }}", "str.translate is not there"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "a block within itself": ("{% block b %}{{ self.b() }}{% endblock %}", "RecursionError"),
    "changes": ("{{ messages.append(1) }}", "SecurityError"),
    "a private name": ("{{ namespace(__class__=1) }}", "SecurityError"),
    "other templates": ("{% include 'other' %}", "no loader"),
    "escaping": ("{% autoescape true %}{% endautoescape %}", "autoescape is not there"),
    "a filter left out": ("{{ 'a' | urlize }}", "No filter named 'urlize'"),
}
ONE = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("case", ENDLESS)
def test_work_without_end_is_stopped_within_two_seconds(case):
    begun = time.thread_time()
    with pytest.raises(ModelFolderError, match=f"in f must render within {MAX_STEPS} steps"):
        ChatTemplate(ENDLESS[case], "f").render(ONE)
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("case", REFUSED)
def test_what_takes_much_at_once_is_refused(case):
    source, words = REFUSED[case]
    begun = time.thread_time()
    with pytest.raises(ModelFolderError) as caught:
        ChatTemplate(source, "f").render(ONE)
    assert time.thread_time() - begun < 2
    assert words in str(caught.value)


def test_no_template_takes_more_than_64_mib(tmp_path):
    """All of the above in one process, which says by how much it grew at most."""
    program = (
        "import resource, sys, test_chat_template as t\n"
        "from headrace.chat_template import ChatTemplate\n"
        "from headrace.errors import ModelFolderError\n"
        "ChatTemplate(t.ODDS, 'f').render(t.TALK)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "refused = [one for one, _ in t.REFUSED.values()]\n"
        "for source in [*t.ENDLESS.values(), *refused, '{{ ' + 'a ~ ' * 4000 + 'a }}']:\n"
        "    try:\n"
        "        ChatTemplate(source, 'f').render(t.ONE)\n"
        "    except ModelFolderError:\n"
        "        pass\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=__file__.rsplit("/", 1)[0], timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64


def test_a_long_conversation_has_steps_in_proportion():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 2000} for i in range(400)]
    rendered = ChatTemplate(THOUGHTS, "f").render(messages, add_generation_prompt=True)
    assert len(rendered) > 400 * 10_000 > MAX_STEPS


def test_threads_render_without_disturbing_each_other():
    template, wanted = ChatTemplate(THOUGHTS, "f"), ChatTemplate(THOUGHTS, "f").render(CALLS, tools=TOOLS)
    found, failed = [], []

    def render(source: str | None) -> None:
        for _ in range(20):
            if source is None:
                found.append(template.render(CALLS, tools=TOOLS))
            else:
                with pytest.raises(ModelFolderError):
                    ChatTemplate(source, "f").render(ONE)
                failed.append(1)

    threads = [threading.Thread(target=render, args=(one,)) for one in (None, "{{ 'a' * 10**9 }}", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 40
    assert len(failed) == 20


def test_messages_of_other_types_are_seen_as_plain_ones():
    class Text(str):
        def leak(self) -> str:
            return "leaked"

    message = {"role": Text("user"), "content": object(), "numbers": (1, True, 2.5, None)}
    source = (
        "{{ messages[0].role }} {{ messages[0].content }} {{ messages[0].numbers }} {{ messages[0].role.leak }}"
    )
    assert ChatTemplate(source, "f").render([message]) == "user <object> (1, True, 2.5, None) "
