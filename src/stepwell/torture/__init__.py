"""Kill a store at random, start it again, and compare what comes back: `stepwell torture`.

    universe (what may be saved) -> world (directories, sizes) -> child (works, and logs) -> ledger (what must be found)
                                                              run: kill, start again, judge
"""
