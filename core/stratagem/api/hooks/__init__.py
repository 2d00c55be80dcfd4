"""Every hook of a run, in the order in which they are called; the last two end it.

Plugin authors need this module, `stratagem.api.kinds` and `stratagem.api.context`.

[Note: answering, acting, wrapping]
* An **answer** hook (``firstresult``) is answered by exactly one plugin, and the answer is never None. Where no plugin
  answers, the core's default does. Two plugins that answer are an error before anything runs.
* Any number of plugins may **wrap** an answer hook with ``@hookimpl(wrapper=True)``: code before ``yield``, the inner
  answer as its value, code after. A wrapper can change the answer; it cannot change the arguments, nor skip the rest.
* Every other hook is **acted** on by all plugins that implement it, in the order of the stack: strategies (outer ones
  first), precision, comm hooks, environment, launcher, accelerator, checkpoint format, then callbacks as listed, then
  loggers. "All enter" means that each returned context manager is entered, in that order.

An implementation names only the arguments that it uses. `run` is a `stratagem.api.context.RunContext`: together with
the bases of `stratagem.api.kinds` that is all of the core that a plugin uses. A hook runs in every process, unless its
description says otherwise.

Other packages add hooks, as the Trainer adds its events. A plugin that works without such a package marks them with
``@hookimpl(optionalhook=True)``.
"""

from stratagem.api.hooks.answers import *  # noqa: F403
