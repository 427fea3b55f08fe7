"""Finds definitions in a syntax tree and replaces code in them.

Formatting, comments and the names of other functions do not matter.
"""

import ast

_OPENS_A_SCOPE = (ast.FunctionDef, ast.ClassDef)


def definition(tree: ast.Module, name: str):
    """Returns the function, class or assignment with this qualified name.

    A function inside another is named `outer.inner`.

    Raises:
        LookupError: there is not exactly one.
    """
    found = [tree]
    for part in name.split("."):
        found = [node for scope in found for node in _inside(scope) if part in _names(node)]
    if len(found) != 1:
        raise LookupError(f"{name} is defined {len(found)} times; it must be defined once")
    return found[0]


def _inside(scope):
    """Yields every node of a scope, except those inside nested scopes."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _OPENS_A_SCOPE):
            yield from _inside(node)


def _names(node):
    if isinstance(node, _OPENS_A_SCOPE):
        return [node.name]
    targets = getattr(node, "targets", [node.target] if isinstance(node, ast.AnnAssign) else [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def check_names(node, names) -> None:
    """Checks that a definition has each of these names, such as "x" or "jnp.where".

    Raises:
        LookupError: it does not.
    """
    inner = list(ast.walk(node))
    found = {x.arg for x in inner if isinstance(x, ast.arg)}
    found |= {ast.unparse(x) for x in inner if isinstance(x, ast.Name | ast.Attribute)}
    if missing := set(names) - found:
        raise LookupError(f"{', '.join(missing)} does not occur")


def replace(node, old: str, new: str) -> None:
    """Replaces `old`, an expression or consecutive statements, by `new` inside the node.

    Raises:
        LookupError: `old` does not occur exactly once.
    """
    replacing = _Replacing(ast.parse(old).body, ast.parse(new).body)
    replacing.generic_visit(node)
    if replacing.count != 1:
        raise LookupError(f"{old!r} occurs {replacing.count} times; it must occur exactly once")


class _Replacing(ast.NodeTransformer):
    def __init__(self, old, new):
        self.count = 0
        self.is_expression = len(old) == len(new) == 1 and all(
            isinstance(node, ast.Expr) for node in (*old, *new)
        )
        self.old = [ast.dump(node.value if self.is_expression else node) for node in old]
        self.new = [node.value if self.is_expression else node for node in new]

    def visit(self, node):
        if self.is_expression and ast.dump(node) == self.old[0]:
            self.count += 1
            return self.new[0]
        return self.generic_visit(node)

    def generic_visit(self, node):
        super().generic_visit(node)
        if not self.is_expression:
            for body in ("body", "orelse", "finalbody"):
                statements = getattr(node, body, None)
                if isinstance(statements, list):
                    setattr(node, body, self._replaced(statements))
        return node

    def _replaced(self, statements):
        dumped, size = [ast.dump(node) for node in statements], len(self.old)
        found = [i for i in range(len(dumped)) if dumped[i : i + size] == self.old]
        self.count += len(found)
        for i in found:
            statements = [*statements[:i], *self.new, *statements[i + size :]]
        return statements
