"""A chat template for tokenizers without one. It needs no special token except the end of text."""

PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message.role + ':\\n' + message.content }}
    {{- eos_token if message.role == 'assistant' else '' }}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant:\\n' }}
{%- endif %}
"""
