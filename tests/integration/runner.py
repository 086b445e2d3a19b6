"""Runs one module of tests: `runner.py NAME`. Exit code 0: all passed, some perhaps skipped; 77: every
one was skipped, so nothing was shown; 1: a failure, or there are no tests."""

import sys
import unittest

ALL_SKIPPED = 77


class Result(unittest.TextTestResult):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def exit_code(result):
    if not result.wasSuccessful():
        return 1
    if result.passed > 0:
        return 0
    return ALL_SKIPPED if result.skipped else 1


def main():
    suite = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    sys.exit(exit_code(runner.run(suite)))


if __name__ == "__main__":
    main()
