"""Chat template for tokenizers without a chat template; it needs only the end-of-text token."""

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
