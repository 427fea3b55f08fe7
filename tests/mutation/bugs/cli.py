"""Bugs of the command line: how its words become the arguments of a verb."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

ARGUMENTS = "cli/test_arguments.py"

BUGS = (
    Bug(
        "a flag of a nested dataclass is ignored",
        "cli.arguments:_filled",
        Replace("_filled(type(value), given, value)", "value"),
        f"{ARGUMENTS}::test_given_command_line_flags_replace_the_defaults[decoder]",
    ),
    Bug(
        "a repeated flag loses its first values",
        "cli.arguments:take",
        Replace("repeated + following", "following"),
        f"{ARGUMENTS}::test_a_repeated_flag_collects_its_values",
    ),
    Bug(
        "a word after -- is read as a flag",
        "cli.arguments:split",
        Replace("(word := words.popleft()) != '--'", "(word := words.popleft()) != '---'"),
        f"{ARGUMENTS}::test_positional_arguments_may_follow_flags",
    ),
    Bug(
        "a negated flag turns its field on",
        "cli.arguments:_take_words",
        Replace("name.replace('_', '-') != flag.names[-1]", "True"),
        "training/test_fitting.py::test_train_accepts_all_spellings_of_flags[decoder]",
    ),
    Bug(
        "a switch with a value is accepted",
        "cli.arguments:_take_words",
        Replace("flag.hint is bool", "False"),
        f"{ARGUMENTS}::test_flag_without_value_and_switch_with_value_are_refused[verify]",
    ),
    Bug(
        "a flag of another kind of model is unknown without a reason",
        "cli.train_arguments:read_train",
        Replace("asks_for_help(argv)", "True"),
        f"{ARGUMENTS}::test_command_line_errors_name_the_accepted_arguments",
    ),
    Bug(
        "the error of a resumed run lists fields that are no flags",
        "cli.train_arguments:check_unchanged",
        Replace(
            "', '.join((flag.name for flag in flags if flag.field in RESUMABLE))",
            "', '.join(map(spell_flag, RESUMABLE))",
        ),
        f"{ARGUMENTS}::test_error_of_a_resumed_run_lists_only_flags_of_its_command[decoder]",
    ),
)
