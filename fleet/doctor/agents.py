"""Looks at the agents' command lines."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from fleet.config import AgentConfig
from fleet.doctor.clis import PACKAGES, CliError, Package, bundled, installed_version, tested, version_of
from fleet.doctor.findings import Finding
from fleet.environment import agent_environment


def agent_findings(agent_type: str, settings: AgentConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Look whether an agent of this type can be run here, and whether its version is a tested one."""
    subject = f"agent {agent_type}"
    package = PACKAGES.get(agent_type)
    if package is None:
        return [_scripted(subject, settings)]
    version = installed_version(package)
    if version is None and (package.is_sdk or not settings.executable):
        return [_not_installed(subject, agent_type, package, settings)]
    executable = settings.executable or str(bundled(package))
    env = agent_environment(environ, settings.env)
    try:
        cli = version_of(executable, env)
        wanted = _wanted(package, env)
    except CliError as error:
        return [Finding(subject, "problem", str(error), f"install it anew, or correct agents.{agent_type}.executable")]
    said = f"version {cli}, {executable}{'' if settings.executable else f', of {package.name} {version}'}"
    if package.is_sdk and version is not None and version not in tested(package):
        untested = f"tested is {package.name} {tested(package)}"
    elif cli not in wanted:
        untested = f"tested is {wanted}"
    else:
        return [Finding(subject, "ok", said)]
    return [Finding(subject, "warning", f"{said}; {untested}", "try it before you rely on it, or install that one")]


def _wanted(package: Package, env: Mapping[str, str]) -> SpecifierSet:
    """Return the versions of a CLI that are tested: with an SDK, the one that it brings and what is compatible with it.

    Raises:
        CliError: the SDK's own can't be asked.
    """
    own = bundled(package)
    if not package.is_sdk:
        return tested(package)
    if own is None:
        return SpecifierSet()
    return SpecifierSet(f"~={version_of(str(own), env)}")


def _scripted(subject: str, settings: AgentConfig) -> Finding:
    if settings.script is not None and settings.script.is_file():
        return Finding(subject, "ok", f"plays {settings.script}")
    return Finding(subject, "problem", f"there is no script {settings.script}", "correct agents.scripted.script")


def _not_installed(subject: str, agent_type: str, package: Package, settings: AgentConfig) -> Finding:
    install = f"pip install 'blobhub-fleet[{package.extra}]'"
    if settings.executable:
        detail = (
            f"{settings.executable} is configured, but {package.name}, through which it is driven, is not installed"
        )
        return Finding(subject, "problem", detail, install)
    remedy = install if package.is_sdk else f"{install}, or set agents.{agent_type}.executable"
    return Finding(subject, "warning", f"{package.name} is not installed: threads that ask for it fail here", remedy)
