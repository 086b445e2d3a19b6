"""When a module of tests counts as passed, skipped or failed."""

import io
import unittest

import runner


class Passes(unittest.TestCase):
    def test(self):
        pass


class Skips(unittest.TestCase):
    def test(self):
        self.skipTest("not here")


class SkipsAsAClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("none of them here")

    def test(self):
        pass


class Fails(unittest.TestCase):
    def test(self):
        self.fail("as it should")


def load_tests(loader, _tests, _pattern):
    return loader.loadTestsFromTestCase(ExitCode)  # the cases above are its material


class ExitCode(unittest.TestCase):
    def of(self, *cases):
        suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
        text = unittest.TextTestRunner(stream=io.StringIO(), resultclass=runner.Result)
        return runner.exit_code(text.run(suite))

    def test_a_skipped_test_does_not_hide_those_that_passed(self):
        self.assertEqual(self.of(Passes, Skips, SkipsAsAClass), 0)

    def test_all_skipped(self):
        self.assertEqual(self.of(Skips), runner.ALL_SKIPPED)
        self.assertEqual(self.of(SkipsAsAClass), runner.ALL_SKIPPED)

    def test_a_failure_counts_most(self):
        self.assertEqual(self.of(Passes, Skips, Fails), 1)

    def test_no_tests_are_no_success(self):
        self.assertEqual(self.of(), 1)


if __name__ == "__main__":
    unittest.main()
