"""Bugs of user-defined functions by name, on the command line and in a loaded folder."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

OWN = "cli/test_own_parts.py"
UNTRUSTED = f"{OWN}::test_no_command_opens_an_untrusted_folder_or_imports_its_modules"
REFUSED = f"{OWN}::test_train_rejects_an_invalid_function_in_one_line_before_it_writes_files"
TRAINED = f"{OWN}::test_run_with_user_defined_functions_is_trained_resumed_and_loaded"
SWEPT = f"{OWN}::test_sweep_and_compare_show_the_names_of_user_defined_functions"
FOUND = "not found and trust_code"

BUGS = (
    Bug(
        "an untrusted folder imports the module that it names",
        "artifacts.values:_found",
        Replace(FOUND, "not found"),
        UNTRUSTED,
    ),
    Bug(
        "a checkpoint's functions are imported without --trust-code",
        "training.own_names:require_trust",
        gives(None),
        UNTRUSTED,
    ),
    Bug(
        "a trusted folder imports a function that the caller has passed",
        "artifacts.values:_found",
        Replace(FOUND, "trust_code"),
        f"{OWN}::test_load_uses_functions_passed_by_the_caller_instead_of_importing_functions",
    ),
    Bug(
        "a named class need not be a dataclass",
        "artifacts.values:_found",
        Replace("kind == 'class' and not is_dataclass(imported)", "False"),
        f"{OWN}::test_name_in_a_trusted_folder_must_refer_to_a_valid_class_or_function",
    ),
    Bug("export opens a model with own functions", "cli.export:_check_own", gives(None), UNTRUSTED),
    Bug(
        "modules in the current directory are not found",
        "artifacts.own_code:import_named",
        Replace("os.getcwd() not in sys.path", "False"),
        REFUSED,
    ),
    Bug(
        "the results of own functions are not checked",
        "models.builders.check_own:check_functions",
        gives(None),
        REFUSED,
    ),
    Bug(
        "the results of own functions of a folder are not checked",
        "hub.load:load",
        Replace("check_functions(functions, config)", "None"),
        f"{OWN}::test_name_in_a_trusted_folder_must_refer_to_a_valid_class_or_function",
    ),
    Bug(
        "the config of a run has parts that own functions replace",
        "training.fitting:_own_parts",
        gives(None),
        f"{OWN}::test_run_config_with_user_defined_functions_has_the_parameter_count_of_its_model",
    ),
    Bug(
        "a run that starts from a saved model has parts that its functions replace",
        "training.own_names:OwnNames.without_replaced",
        Replace("self.unused.items()", "()"),
        f"{OWN}::test_saved_model_with_user_defined_functions_can_be_fine_tuned",
    ),
    Bug(
        "a run does not store the names of own functions",
        "training.own_names:OwnNames.sections",
        gives({}),
        TRAINED,
    ),
    Bug(
        "a run that starts from a checkpoint may name another function",
        "training.presets:check_same_model",
        Replace("differences(before.own, after.own)", "{}"),
        TRAINED,
    ),
    Bug(
        "runs that share one compiled program are trained without own functions",
        "cli.sweep:_train_group",
        Replace(
            "build(config.model, config.execution, **config.own.load(config.model))",
            "build(config.model, config.execution)",
        ),
        SWEPT,
    ),
    Bug(
        "compare does not show the names of own functions",
        "training.compare:_settings",
        Replace("_SECTIONS", "_SECTIONS[:-1]"),
        SWEPT,
    ),
)
