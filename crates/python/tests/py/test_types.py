"""The types of the native part: what its stub declares is there, and nothing else."""

import ast
import importlib.resources
import inspect
import types
import unittest

import cowslip
from cowslip import _cowslip

# Attributes that Python gives every class of an extension.
OF_EVERY_CLASS = {"__doc__", "__module__"}

Function = ast.FunctionDef


def decorators(node: Function | ast.ClassDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def declared(arguments: ast.arguments) -> list[tuple[str, bool, str | None]]:
    """Name, whether it is given by name only, and default of each argument."""
    positional = arguments.posonlyargs + arguments.args
    required = len(positional) - len(arguments.defaults)
    defaults = [None] * required + [ast.unparse(value) for value in arguments.defaults]
    by_name = [None if value is None else ast.unparse(value) for value in arguments.kw_defaults]
    found = [(a.arg, False, value) for a, value in zip(positional, defaults, strict=True)]
    found += [(a.arg, True, value) for a, value in zip(arguments.kwonlyargs, by_name, strict=True)]
    return found


def actual(function: object) -> list[tuple[str, bool, str | None]]:
    """The same of what is there."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not parameter.empty
        default = repr(parameter.default) if has_default else None
        found.append((parameter.name, parameter.kind is parameter.KEYWORD_ONLY, default))
    return found


class Stub(unittest.TestCase):
    def setUp(self) -> None:
        package = importlib.resources.files(cowslip)
        self.assertTrue(package.joinpath("py.typed").is_file())
        stub = ast.parse(package.joinpath("_cowslip.pyi").read_text())
        named = (Function, ast.ClassDef)
        self.items = {node.name: node for node in stub.body if isinstance(node, named)}
        values = [node for node in stub.body if isinstance(node, ast.AnnAssign)]
        self.values = {node.target.id: ast.unparse(node.annotation) for node in values}

    def test_it_has_the_names_of_the_module(self) -> None:
        names = {name for name in dir(_cowslip) if not name.startswith("__")}
        self.assertEqual(names, set(self.items) | set(self.values))
        self.assertEqual(names, set(_cowslip.__all__))
        for name, annotation in self.values.items():
            self.assertEqual(type(getattr(_cowslip, name)).__name__, annotation)

    def test_functions_have_its_arguments(self) -> None:
        functions = [node for node in self.items.values() if isinstance(node, Function)]
        self.assertTrue(functions)
        for node in functions:
            with self.subTest(node.name):
                function = getattr(_cowslip, node.name)
                self.assertIsInstance(function, types.BuiltinFunctionType)
                self.assertEqual(actual(function), declared(node.args))

    def test_classes_have_its_members(self) -> None:
        classes = [node for node in self.items.values() if isinstance(node, ast.ClassDef)]
        self.assertTrue(classes)
        for node in classes:
            members = {member.name: member for member in node.body}
            with self.subTest(node.name):
                found = getattr(_cowslip, node.name)
                self.assertEqual(set(vars(found)) - OF_EVERY_CLASS, set(members))
                self.assert_may_be_derived_from(found, "final" not in decorators(node))
            for name, member in members.items():
                with self.subTest(f"{node.name}.{name}"):
                    self.assert_is_declared(found, member)

    def assert_may_be_derived_from(self, found: type, may_be: bool) -> None:
        try:
            type("Derived", (found,), {})
        except TypeError:
            self.assertFalse(may_be)
        else:
            self.assertTrue(may_be)

    def assert_is_declared(self, found: type, member: Function) -> None:
        there = vars(found)[member.name]
        is_property = isinstance(there, types.GetSetDescriptorType)
        self.assertEqual(is_property, "property" in decorators(member))
        if is_property:
            return
        # A class has the arguments of what makes its objects, without the class itself.
        arguments = declared(member.args)
        if member.name == "__new__":
            self.assertEqual(actual(found), arguments[1:])
        else:
            self.assertEqual(actual(there), arguments)
