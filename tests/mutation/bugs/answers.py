"""Bugs of stop strings, grammars, penalties, files of prompts and chats."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

STOPS = "decoding/test_stop_strings.py"
GRAMMARS = "decoding/test_grammars.py"
CONSTRAINTS = (
    "decoding/test_constraints.py::test_decoding_constraints_change_scores_like_a_python_reference"
)
PENALTIES = (
    "decoding/test_constraints.py::"
    "test_frequency_penalty_is_subtracted_per_occurrence_and_presence_penalty_once"
)
PROMPTS = "cli/test_prompts.py"
CHAT = "cli/test_chat.py"
FIRST_STOP = f"{STOPS}::test_text_ends_with_the_first_token_that_completes_a_stop_string"
STREAMED = f"{STOPS}::test_streamed_text_ends_before_the_first_stop_string"
IN_ORDER = (
    f"{PROMPTS}::test_prompts_from_a_file_give_the_same_texts_as_single_prompts_in_file_order"
)
RESUMED = f"{PROMPTS}::test_an_interrupted_command_writes_the_same_file_when_it_is_repeated"

BUGS = (
    Bug(
        "norms of Gemma in a GGUF file lack their one",
        "hub.gguf:to_gguf_layout",
        Replace("tensor = tensor + 1", "pass"),
        "hub/test_gguf.py::test_gguf_file_of_gemma_stores_norm_scales_plus_one_and_layer_windows",
    ),
    Bug(
        "layers without a window have the base of the others in a GGUF file",
        "hub.gguf_gemma:gemma_header",
        Replace(
            'header["rope_freq_base_swa"] = header["rope_freq_base"] = layer.base',
            'header["rope_freq_base_swa"] = 1e4',
        ),
        "hub/test_gguf.py::test_gguf_file_of_gemma_stores_norm_scales_plus_one_and_layer_windows",
    ),
    Bug(
        "spaces of a unigram model are not merged in a GGUF file",
        "hub.gguf_vocabulary:_unigram",
        Replace("merges_spaces = True", "pass"),
        "hub/test_gguf_vocabulary.py::test_gguf_file_stores_the_unigram_model_of_sentencepiece",
    ),
    Bug(
        "the weights of files are ignored",
        "training.data.examples:repeat_by_weight",
        Replace("text.weight", "1.0"),
        "training/data/test_examples.py::test_records_are_repeated_in_proportion_to_the_weight_of_their_file",
    ),
    Bug(
        "a stop string is forgotten after a wrong character",
        "decoding.stop_strings:StopStrings._automaton",
        Replace("range(len(text) + 1)", "(0, len(text))"),
        FIRST_STOP,
    ),
    Bug(
        "only the last byte of a token is read for stop strings",
        "decoding.stop_strings:_token_table",
        Replace("words[token][place]", "words[token][-1]"),
        FIRST_STOP,
    ),
    Bug(
        "the beginning of a stop string is shown",
        "decoding.stop_strings:StoppedStream._release",
        Replace("not self.stopped and not is_end", "False"),
        STREAMED,
    ),
    Bug(
        "text after a stop string is shown",
        "decoding.stop_strings:StoppedStream._release",
        Replace("self.stopped = end <= len(text)", "self.stopped = False"),
        STREAMED,
    ),
    Bug(
        "generate ignores stop strings",
        "decoding.steps:_choose",
        Replace("stop_state == len(choice.stop_table) - 1", "False"),
        "decoding/test_generation.py::test_generated_texts_end_at_their_first_stop_string",
    ),
    Bug(
        "a space mark is no space",
        "artifacts.token_bytes:_spaces",
        gives({}),
        "artifacts/test_stream.py::test_decoded_text_is_the_concatenation_of_the_bytes_of_its_tokens",
    ),
    Bug(
        "byte tokens are spelled out",
        "artifacts.token_bytes:vocabulary_bytes",
        Replace('BYTE_TOKEN.fullmatch(content) if "ByteFallback" in names else None', "None"),
        "artifacts/test_stream.py::test_decoded_text_is_the_concatenation_of_the_bytes_of_its_tokens",
    ),
    Bug(
        "a grammar does not read the generated tokens",
        "decoding.grammars:BatchMatcher.push",
        Replace("self._matchers[index].push(token)", "pass"),
        f"{GRAMMARS}::test_generate_follows_a_grammar_that_a_user_wrote",
    ),
    Bug(
        "all texts of a batch share a matcher",
        "decoding.grammars:GuidedGrammar.start",
        Replace("first.deep_copy()", "first"),
        f"{GRAMMARS}::test_generated_json_fits_its_schema_in_every_batch",
    ),
    Bug(
        "a grammar does not limit the tokens",
        "decoding.steps:_choose",
        Replace("choice.allowed is not None", "False"),
        f"{GRAMMARS}::test_generate_follows_a_grammar_that_a_user_wrote",
    ),
    Bug(
        "the frequency penalty counts the prompt",
        "decoding.constraints:_bias_tokens",
        Replace("text.tokens[:, rules.prompts.shape[1] :]", "text.tokens"),
        PENALTIES,
    ),
    Bug(
        "the presence penalty counts repetitions",
        "decoding.constraints:_bias_tokens",
        Replace(
            "constraints.presence_penalty * (counts > 0)", "constraints.presence_penalty * counts"
        ),
        PENALTIES,
    ),
    Bug(
        "the only allowed tokens are the forbidden ones",
        "decoding.constraints:_suppress_tokens",
        Replace(
            "jnp.where(_vocabulary_mask(constraints.allowed_tokens, scores), scores, -jnp.inf)",
            "jnp.where(_vocabulary_mask(constraints.allowed_tokens, scores), -jnp.inf, scores)",
        ),
        CONSTRAINTS,
    ),
    Bug(
        "results of prompts are written in the order of their length",
        "cli.prompts:Files.generate",
        Replace(
            "(record.fields | self.done[i] for i, record in enumerate(self.records))",
            "(record.fields | x for record, x in zip(self.records, self.done.values()))",
        ),
        IN_ORDER,
    ),
    Bug(
        "a resumed command samples with other keys",
        "cli.prompts:Files.generate",
        Replace(
            "call.run([prompts[i] for i in indices], number)",
            "call.run([prompts[i] for i in indices], new_tokens)",
        ),
        RESUMED,
    ),
    Bug(
        "a resumed command computes all prompts again",
        "cli.prompts:Files.generate",
        Replace("any(index not in self.done for index in indices)", "True"),
        RESUMED,
    ),
    Bug(
        "results of other settings are kept",
        "cli.prompts:Files.resume",
        Replace("first != settings", "False"),
        RESUMED,
    ),
    Bug(
        "the end of a prompt is dropped",
        "cli.generate:without_beginning",
        Replace("prompt[-kept:]", "prompt[:kept]"),
        "cli/test_prompts.py::test_too_long_prompts_are_refused_or_lose_their_beginning",
    ),
    Bug(
        "a chat forgets the answers",
        "cli.chat:Chat.answer",
        Replace('self.messages.append({"role": "assistant", "content": answer})', "pass"),
        f"{CHAT}::test_chat_prompt_contains_all_previous_messages_until_the_conversation_is_cleared",
    ),
    Bug(
        "Ctrl-C ends a chat",
        "cli.chat:Chat.answer",
        Replace("suppress(KeyboardInterrupt)", "suppress()"),
        f"{CHAT}::test_keyboard_interrupt_stops_a_chat_answer_but_keeps_the_text_written_so_far",
    ),
    Bug(
        "a chat forgets the newest messages",
        "cli.chat:Chat._shortened_prompt",
        Replace("del self.messages[:2]", "del self.messages[-2:]"),
        f"{CHAT}::test_oldest_messages_are_forgotten_if_there_is_no_room",
    ),
    Bug(
        "an answer does not end with its turn",
        "artifacts.tokenizer:Tokenizer.turn_end_tokens",
        Replace("islice(after, 1)", "()"),
        "artifacts/chat/test_masks.py::test_an_answer_ends_with_the_special_token_of_its_turn",
    ),
)
