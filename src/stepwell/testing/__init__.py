"""Test stores, tiers and movers against what they promise. Read `model` first: it is the specification.

    model            what a store promises, as a dict              index_model   the index, to the last id and slot
    driver, machine  a store held to the model, step by step:      world, caller, operations, pages; stepped: no
                     by a seed, or as hypothesis chooses           threads, no clock. sequence_*: with a device tier
    recorder         threads on a real store, their calls          history, linearize, page_model, workers
                     ordered and held to a model of each page
    contract         what a tier must do, one's own too            tier, faulty, plugin, *_contract, trial, ...
    faults, hooks    fault points of the core; stores that lie     powerloss     a power loss at any file call

Commands: `python -m stepwell.testing`, `python -m stepwell.testing.recorder`, `pytest --stepwell-tier module:make`.
"""
