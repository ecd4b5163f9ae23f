import pytest
from jobs import Job


def job_of(size):
    @pytest.fixture(scope='session')
    def job(tmp_path_factory):
        job = Job(size, tmp_path_factory.mktemp(f'job-of-{size}'))
        yield job
        job.close()
    return job


two_processes, three_processes = map(job_of, (2, 3))
