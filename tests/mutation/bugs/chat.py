"""Bugs of conversations and of tuning: special tokens of authors, wrong masks, leaks."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

MASKS = "artifacts/chat/test_masks.py"
SANDBOX = "artifacts/chat/test_sandbox.py"
SPECIAL = "artifacts/chat/test_special_tokens.py"
TEMPLATES = "artifacts/chat/test_templates.py"
EXAMPLES = "training/data/test_examples.py"
LOSSES = "functional/losses/test_preference.py"
PREFERENCE = "training/test_preference.py"
PACKED = "training/data/test_packed_examples.py"
LIMIT = f"{SANDBOX}::test_template_loops_and_output_count_towards_the_limits"

BUGS = (
    Bug(
        "a special token that a message spells out is a special token",
        "artifacts.chat.messages:SpecialTokenBreaker._break_tokens",
        Replace("return self._inner.sub(self._mark, text)", "return text"),
        f"{SPECIAL}::test_message_text_is_never_encoded_as_a_special_token",
    ),
    Bug(
        "the end of a message and the template join to a special token",
        "artifacts.chat.messages:SpecialTokenBreaker._break_text",
        Replace("text = self._end.sub(lambda match: match[0] + self._mark, text)", "pass"),
        f"{SPECIAL}::test_message_text_and_adjacent_template_text_never_form_a_special_token",
    ),
    Bug(
        "the template and the beginning of a message join to a special token",
        "artifacts.chat.messages:SpecialTokenBreaker._break_text",
        Replace("return self._begin.sub(lambda match: match[0] + self._mark, text)", "return text"),
        f"{SPECIAL}::test_message_text_and_adjacent_template_text_never_form_a_special_token",
    ),
    Bug(
        "keys of a tool's description become special tokens",
        "artifacts.chat.messages:SpecialTokenBreaker.break_data",
        Replace("self._break_tokens(k)", "k"),
        f"{SPECIAL}::test_tools_and_tool_calls_and_tool_results_are_never_encoded_as_special_tokens",
    ),
    Bug(
        "a document becomes special tokens",
        "artifacts.chat.conversation:encode_chat",
        Replace("broken != chat", "broken.messages != chat.messages"),
        f"{SPECIAL}::test_documents_and_template_variables_are_never_encoded_as_special_tokens",
    ),
    Bug(
        "tools of a prompt are not read",
        "training.data.examples:_encode_form",
        Replace('fields["prompt"], fields.get("tools")', 'fields["prompt"], None'),
        f"{EXAMPLES}::test_chat_template_receives_the_tools_of_a_record",
    ),
    Bug(
        "a template decides by a spelled out special token",
        "artifacts.chat.conversation:encode_chat",
        Replace('re.sub(f"[{inner}{before}]", "", rendered) != text', "False"),
        f"{SPECIAL}::test_template_whose_output_depends_on_a_special_token_in_a_message_is_rejected",
    ),
    Bug(
        "the mask begins with the header",
        "artifacts.chat.spans:_Finder._start",
        Replace("return len(before + header)", "return len(before)"),
        f"{MASKS}::test_answer_spans_of_a_simple_template_contain_the_answers",
    ),
    Bug(
        "the mask ends before the token that ends the turn",
        "artifacts.chat.spans:_Finder._end",
        Replace("return len(alone)", "return self._content_end(index)"),
        f"{MASKS}::test_answer_spans_of_a_simple_template_contain_the_answers",
    ),
    Bug(
        "the mask may miss the text of the turn",
        "artifacts.chat.spans:_Finder.span",
        Replace("has_others", "False"),
        f"{MASKS}::test_error_names_the_chat_template_if_answers_cannot_be_located",
    ),
    Bug(
        "the prompt is not compared at the level of tokens",
        "artifacts.chat.conversation:Encoded._check_prompt",
        gives(None),
        f"{MASKS}::test_prompt_whose_tokens_depend_on_the_answer_is_refused",
    ),
    Bug(
        "padding is never learnt",
        "artifacts.chat.conversation:covered",
        Replace("token.end > spans[at].start", "token.end > spans[at].start and token.id != 1"),
        f"{MASKS}::test_assistant_mask_includes_an_end_of_turn_token_that_is_also_the_padding_token",
    ),
    Bug(
        "loops of a template cost no steps",
        "artifacts.chat.limits:BoundedEnvironment.counted",
        Replace("budget.step()", "pass"),
        LIMIT,
    ),
    Bug(
        "a template may print any number of characters",
        "artifacts.chat.limits:Budget.text",
        Replace("length > LONGEST_TEXT or self.characters < 0", "length > LONGEST_TEXT"),
        LIMIT,
    ),
    Bug(
        "an empty answer is accepted",
        "artifacts.chat.messages:_check_message",
        Replace("needs_text", "role == 'user'"),
        f"{TEMPLATES}::test_malformed_messages_raise_a_one_line_error",
    ),
    Bug(
        "the template of the settings hides the template file",
        "artifacts.chat.template:read_templates",
        Replace("TEMPLATE in files", 'TEMPLATE in files and "default" not in found'),
        f"{TEMPLATES}::test_template_files_take_precedence_over_the_settings",
    ),
    Bug(
        "the weights of packed examples are shifted by one",
        "training.data.packing:pack_sequence",
        Replace("mask[1:]", "mask[:-1]"),
        f"{PACKED}::test_batches_contain_every_example_once_per_epoch",
    ),
    Bug(
        "packed examples see each other",
        "training.data.packing:pack_sequence",
        Replace("(mask[1:], number)", "(mask[1:], 1)"),
        f"{PACKED}::test_loss_of_packed_examples_is_the_sum_of_the_losses_of_single_examples",
    ),
    Bug(
        "the last example of an epoch is left out",
        "training.data.packing:PackedBatches._plan_epoch",
        Replace("order.tolist()", "order.tolist()[1:]"),
        f"{PACKED}::test_batches_contain_every_example_once_per_epoch",
    ),
    Bug(
        "a restored tuning run begins its epoch again",
        "training.data.epochs:EpochBatches.restore",
        Replace('state["place"]', "0"),
        f"{PACKED}::test_restored_iterator_continues_with_the_next_batch",
    ),
    Bug(
        "a completion has no end",
        "training.data.examples:_ending",
        gives([]),
        f"{EXAMPLES}::test_targets_of_a_record_are_its_answer_and_the_end_of_text",
    ),
    Bug(
        "a prompt gets the tokens that its completion gives it",
        "training.data.examples:encode_completion",
        Replace("whole = [*asked, *answer]", "pass"),
        f"{EXAMPLES}::test_prompt_is_tokenized_separately_from_its_completion",
    ),
    Bug(
        "a record without an answer is accepted",
        "training.data.examples:_encode_record",
        Replace("not all(example.num_targets for example in examples)", "False"),
        f"{EXAMPLES}::test_error_for_an_invalid_record_names_file_and_line",
    ),
    Bug(
        "prompts are held out one by one",
        "training.data.examples:split_texts",
        Replace("text.question", "str(id(text))"),
        f"{EXAMPLES}::test_records_with_the_same_prompt_are_in_the_same_split",
    ),
    Bug(
        "DPO ignores the model before the tuning",
        "functional.losses.preference:dpo_loss",
        Replace(
            "(chosen - rejected) - (reference_chosen - reference_rejected)", "chosen - rejected"
        ),
        f"{LOSSES}::test_dpo_equals_its_formula",
    ),
    Bug(
        "the odds of an answer lack 1 - P",
        "functional.losses.preference:odds_ratio_loss",
        Replace("_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected)", "0.0"),
        f"{LOSSES}::test_odds_ratio_loss_equals_its_formula",
    ),
    Bug(
        "the clipped loss takes the larger term",
        "functional.losses.preference:clipped_policy_loss",
        Replace("jnp.minimum", "jnp.maximum"),
        f"{LOSSES}::test_clipped_policy_loss_equals_its_formula",
    ),
    Bug(
        "an answer's log-probability includes its prompt",
        "training.preference:answer_log_probs",
        Replace("weights > 0", "weights >= 0"),
        f"{PREFERENCE}::test_log_probability_of_an_answer_is_the_sum_over_its_tokens",
    ),
    Bug(
        "pairs of padding count",
        "training.preference:_is_pair",
        Replace("target_weights(batch.chosen) > 0", "target_weights(batch.chosen) >= 0"),
        f"{PREFERENCE}::test_initial_preference_loss_is_log_2_per_pair_and_excludes_padding",
    ),
    Bug(
        "a pair gets the scores of its neighbour",
        "training.data.preferences:pair_batch",
        Replace("np.asarray(pairs, int)", "np.asarray(pairs, int) - 1"),
        f"{PREFERENCE}::test_batches_contain_every_pair_with_its_reference_scores_once_per_epoch",
    ),
)
